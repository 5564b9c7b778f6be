// What parity means: golden cases of a checkpoint, how a run is compared with them, and when it
// passes.
//
// A golden file holds, per case: <case>.ids int64 [L], <case>.logits float32 [min(L, 64), vocab] of
// the last positions, <case>.greedy int64 [G] and <case>.margin float32 [G] (best minus second-best
// logit at each greedy step).
//
// Plain values; no engine.

#ifndef CLI_PARITY_H_
#define CLI_PARITY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/safetensors.h"

namespace cli {

inline constexpr double kMaxLogitDelta = 1e-3;  // of a float32 run, in every logit

struct ParityCase {
  std::string name;
  std::vector<int32_t> ids;
  int32_t num_logit_rows = 0;      // the last positions of the prompt
  absl::Span<const float> logits;  // [num_logit_rows, vocab], in the golden file
  std::vector<int32_t> greedy;
  absl::Span<const float> margin;  // [greedy]
};

// The cases, shortest prompt first.  `golden` must outlive them.
// Errors: kInvalidArgument naming file, tensor, expected and found.
absl::StatusOr<std::vector<ParityCase>> ReadParityCases(const model::Checkpoint& golden,
                                                        int32_t vocab_size);

// What an engine made of a case.
struct CaseRun {
  std::vector<float> logits;       // as ParityCase::logits
  std::vector<int32_t> generated;  // at each greedy step, after the golden tokens before it
  std::string note = {};           // what the path did, in words; may be empty
};

struct CaseReport {
  std::string name;
  std::string note;
  int32_t num_tokens = 0;
  int32_t num_rows = 0;
  double mean_delta = 0;  // mean |logit - golden|; infinite if a logit is no number
  double max_delta = 0;
  int32_t rows_beyond = 0;  // rows with a logit off by more than kMaxLogitDelta
  int32_t greedy_steps = 0;
  int32_t greedy_counted = 0;  // steps whose margin is above twice max_delta
  int32_t greedy_agreed = 0;   // of those
};

CaseReport CompareCase(const ParityCase& golden, const CaseRun& run);

// One path over all cases.
struct PathReport {
  std::string path;
  std::vector<CaseReport> cases = {};
  double MeanOfCaseMeans() const;
};

struct Verdict {
  int32_t passed = 0;  // cases of all paths
  int32_t failed = 0;
};

// Without `max_mean_delta` a case fails on a logit beyond kMaxLogitDelta or on a greedy step that
// counts and differs.  With it the cases of a path pass or fail together: by the mean of their
// means.
Verdict Judge(absl::Span<const PathReport> paths, std::optional<double> max_mean_delta);

// A table of one path, with the mean of case means as its last line.
std::string FormatPath(const PathReport& path);

}  // namespace cli

#endif  // CLI_PARITY_H_

// ParityRunner: computes golden cases with engines, over the paths a prompt can take through the
// system.
//
//   whole     the prompt in one step
//   chunked   its first blocks from the pool, where another sequence left them, the rest in chunks
//             of 48; as many blocks as leave the compared positions to be computed
//   decode    the first 8 tokens in one step, every other one by one in absorbed form (a prompt of
//   at
//             most 8: all but the last in one step)
//   transfer  one engine prefills, the blocks travel over UCX to a second one, which computes the
//   last
//             64 positions (of shorter prompts: as for decode) one by one in absorbed form; a
//             prompt of one token is prefilled and the second engine generates only
//
// Every path then generates in absorbed form, each step after the golden tokens before it, so that
// a near tie does not hide what follows.
//
// Thread-compatible.

#ifndef CLI_PARITY_RUNNER_H_
#define CLI_PARITY_RUNNER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cli/cache_link.h"
#include "cli/engine_session.h"
#include "cli/parity.h"

namespace cli {

enum class ParityPath : uint8_t { kWhole, kChunked, kDecode, kTransfer };

inline constexpr ParityPath kParityPaths[] = {ParityPath::kWhole, ParityPath::kChunked,
                                              ParityPath::kDecode, ParityPath::kTransfer};
std::string_view ParityPathName(ParityPath path);

struct ParityOptions {
  std::string model_dir;
  std::string golden_file;        // empty: golden.safetensors in model_dir
  std::vector<ParityPath> paths;  // empty: all
  std::string device = "cpu";
  std::string dtype = "float32";
  std::string kv_cache_dtype = "auto";
  std::optional<double> max_mean_delta;
};

// Runs everything and prints it to `out`: a table per path, then "N passed, N failed".
// Errors: what keeps a run from taking place; a run that differs is no error but a verdict.
absl::StatusOr<Verdict> RunParity(const ParityOptions& options, std::ostream& out);

class ParityRunner final {
 public:
  static absl::StatusOr<std::unique_ptr<ParityRunner>> Create(const ParityOptions& options,
                                                              absl::Span<const ParityCase> cases);

  absl::StatusOr<CaseRun> Run(ParityPath path, const ParityCase& golden);

 private:
  ParityRunner() = default;
  absl::Status RunWhole(const ParityCase& golden, CaseRun& run);
  absl::Status RunChunked(const ParityCase& golden, CaseRun& run);
  absl::Status RunDecode(const ParityCase& golden, CaseRun& run);
  absl::Status RunTransfer(const ParityCase& golden, CaseRun& run);
  absl::Status OpenLink();

  engine::EngineOptions engine_options_;
  int32_t num_blocks_ = 0;
  std::unique_ptr<EngineSession> session_;
  std::unique_ptr<EngineSession> receiver_;  // of the transfer path
  std::unique_ptr<CacheLink> link_;          // from session_'s cache to receiver_'s
};

}  // namespace cli

#endif  // CLI_PARITY_RUNNER_H_

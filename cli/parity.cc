#include "cli/parity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace cli {
namespace {

constexpr int64_t kMaxLogitRows = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// `shape` with -1 for any size.
absl::StatusOr<const model::TensorView*> Take(const model::Checkpoint& golden,
                                              const std::string& name, const char* dtype,
                                              const std::vector<int64_t>& shape) {
  ASSIGN_OR_RETURN(const model::TensorView* tensor, golden.Get(name));
  bool fits = tensor->dtype_name == dtype && tensor->shape.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || shape[i] == tensor->shape[i];
  }
  if (fits) return tensor;
  return absl::InvalidArgumentError(
      absl::StrCat(tensor->file, ": tensor ", name, ": expected ", dtype, " ", ShapeText(shape),
                   ", found ", tensor->dtype_name, " ", ShapeText(tensor->shape)));
}

template <typename T>
absl::Span<const T> Values(const model::TensorView& tensor) {
  return {reinterpret_cast<const T*>(tensor.data.data()), tensor.data.size() / sizeof(T)};
}

absl::StatusOr<std::vector<int32_t>> TokenIds(const model::TensorView& tensor, int32_t vocab_size) {
  std::vector<int32_t> ids;
  for (const int64_t id : Values<int64_t>(tensor)) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(tensor.file, ": tensor ", tensor.name,
                                                     ": expected token ids below ", vocab_size,
                                                     ", found ", id));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

absl::StatusOr<ParityCase> ReadCase(const model::Checkpoint& golden, const std::string& name,
                                    int32_t vocab_size) {
  ParityCase result;
  result.name = name;
  ASSIGN_OR_RETURN(const model::TensorView* ids, Take(golden, name + ".ids", "I64", {-1}));
  ASSIGN_OR_RETURN(result.ids, TokenIds(*ids, vocab_size));
  if (result.ids.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(ids->file, ": tensor ", name, ".ids: expected token ids, found none"));
  }
  const int64_t rows = std::min<int64_t>(ids->shape[0], kMaxLogitRows);
  result.num_logit_rows = static_cast<int32_t>(rows);
  ASSIGN_OR_RETURN(const model::TensorView* logits,
                   Take(golden, name + ".logits", "F32", {rows, vocab_size}));
  result.logits = Values<float>(*logits);
  ASSIGN_OR_RETURN(const model::TensorView* greedy, Take(golden, name + ".greedy", "I64", {-1}));
  ASSIGN_OR_RETURN(result.greedy, TokenIds(*greedy, vocab_size));
  ASSIGN_OR_RETURN(const model::TensorView* margin,
                   Take(golden, name + ".margin", "F32", {greedy->shape[0]}));
  result.margin = Values<float>(*margin);
  return result;
}

}  // namespace

absl::StatusOr<std::vector<ParityCase>> ReadParityCases(const model::Checkpoint& golden,
                                                        int32_t vocab_size) {
  constexpr std::string_view kSuffix = ".ids";
  std::vector<ParityCase> cases;
  for (const auto& [name, tensor] : golden.tensors()) {
    if (name.size() <= kSuffix.size() ||
        name.compare(name.size() - kSuffix.size(), kSuffix.size(), kSuffix) != 0) {
      continue;
    }
    ASSIGN_OR_RETURN(ParityCase one,
                     ReadCase(golden, name.substr(0, name.size() - kSuffix.size()), vocab_size));
    cases.push_back(std::move(one));
  }
  if (cases.empty()) {
    return absl::InvalidArgumentError("the golden file holds no case: expected tensors <case>.ids");
  }
  std::stable_sort(cases.begin(), cases.end(), [](const ParityCase& a, const ParityCase& b) {
    return a.ids.size() < b.ids.size();
  });
  return cases;
}

CaseReport CompareCase(const ParityCase& golden, const CaseRun& run) {
  FERRY_CHECK(run.logits.size() == golden.logits.size() &&
              run.generated.size() == golden.greedy.size())
      << "a run of another case: " << run.logits.size() << " logits for " << golden.logits.size();
  CaseReport report{.name = golden.name,
                    .note = run.note,
                    .num_tokens = static_cast<int32_t>(golden.ids.size()),
                    .num_rows = golden.num_logit_rows};
  const size_t vocab = golden.logits.size() / golden.num_logit_rows;
  double sum = 0;
  for (int32_t row = 0; row < golden.num_logit_rows; ++row) {
    double row_max = 0;
    for (size_t i = row * vocab; i < (row + 1) * vocab; ++i) {
      double delta = std::abs(double{run.logits[i]} - double{golden.logits[i]});
      if (std::isnan(delta)) delta = kInfinity;
      sum += delta;
      row_max = std::max(row_max, delta);
    }
    report.max_delta = std::max(report.max_delta, row_max);
    if (row_max > kMaxLogitDelta) ++report.rows_beyond;
  }
  report.mean_delta = sum / static_cast<double>(golden.logits.size());
  report.greedy_steps = static_cast<int32_t>(golden.greedy.size());
  for (size_t step = 0; step < golden.greedy.size(); ++step) {
    // Nearer than this the error alone may decide.
    if (!(golden.margin[step] > 2 * report.max_delta)) continue;
    ++report.greedy_counted;
    if (run.generated[step] == golden.greedy[step]) ++report.greedy_agreed;
  }
  return report;
}

double PathReport::MeanOfCaseMeans() const {
  double sum = 0;
  for (const CaseReport& report : cases) sum += report.mean_delta;
  return sum / static_cast<double>(cases.size());
}

Verdict Judge(absl::Span<const PathReport> paths, std::optional<double> max_mean_delta) {
  Verdict verdict;
  for (const PathReport& path : paths) {
    for (const CaseReport& report : path.cases) {
      const bool passed =
          max_mean_delta.has_value()
              ? path.MeanOfCaseMeans() <= *max_mean_delta
              : report.rows_beyond == 0 && report.greedy_agreed == report.greedy_counted;
      ++(passed ? verdict.passed : verdict.failed);
    }
  }
  return verdict;
}

std::string FormatPath(const PathReport& path) {
  std::string text =
      absl::StrFormat("%-9s %-8s %7s %12s %12s %13s  %s\n", path.path, "case", "tokens",
                      "mean |delta|", "max |delta|", "rows > 1e-3", "greedy");
  for (const CaseReport& report : path.cases) {
    const int32_t near_ties = report.greedy_steps - report.greedy_counted;
    absl::StrAppendFormat(&text, "%-9s %-8s %7d %12.3g %12.3g %6d of %3d  %d of %d agree", "",
                          report.name, report.num_tokens, report.mean_delta, report.max_delta,
                          report.rows_beyond, report.num_rows, report.greedy_agreed,
                          report.greedy_counted);
    if (near_ties > 0) absl::StrAppendFormat(&text, ", %d near ties not counted", near_ties);
    if (!report.note.empty()) absl::StrAppend(&text, "; ", report.note);
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppendFormat(&text, "%-9s mean of case means %.6g\n", "", path.MeanOfCaseMeans());
  return text;
}

}  // namespace cli

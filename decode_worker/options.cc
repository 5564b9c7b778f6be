#include "decode_worker/options.h"

#include "absl/strings/str_cat.h"

namespace decode_worker {

absl::Status DecodeOptions::Validate() const {
  std::string problems;
  const auto add = [&](const std::string& problem) {
    absl::StrAppend(&problems, problems.empty() ? "" : "; ", problem);
  };
  if (const absl::Status base = worker.Validate(); !base.ok()) add(std::string(base.message()));
  if (chunk_tokens < 1)
    add(absl::StrCat("--chunk_tokens is ", chunk_tokens, ", at least 1 is needed"));
  if (growth_tokens < 0) add(absl::StrCat("--growth_tokens is ", growth_tokens));
  return problems.empty() ? absl::OkStatus() : absl::InvalidArgumentError(problems);
}

}  // namespace decode_worker

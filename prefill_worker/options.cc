#include "prefill_worker/options.h"

#include "absl/strings/str_cat.h"

namespace prefill_worker {

absl::Status PrefillOptions::Validate() const {
  const absl::Status common = worker.Validate();
  if (chunk_tokens > 0) return common;
  const std::string problem = absl::StrCat("--chunk_tokens: ", chunk_tokens, " is not positive");
  return absl::InvalidArgumentError(
      common.ok() ? problem : absl::StrCat(std::string(common.message()), "; ", problem));
}

}  // namespace prefill_worker

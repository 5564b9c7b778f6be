// LoadBackend: the server that a load run asks, whatever it speaks.

#ifndef CLI_LOAD_BACKEND_H_
#define CLI_LOAD_BACKEND_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cli/load_trace.h"

namespace cli {

struct LoadRequest {
  Prompt prompt = {};  // all of it, with what the conversation had before
  int32_t output_tokens = 0;
  uint64_t seed = 0;
};

// What the server said of one request; absent: it does not tell.
struct LoadAnswer {
  std::optional<uint32_t> output_tokens = {};
  std::vector<uint32_t> output_ids = {};  // empty: not told
  std::optional<uint32_t> prompt_tokens = {};
  std::optional<uint32_t> cached_tokens = {};  // of the prompt, not computed again
  std::optional<uint64_t> kv_bytes = {};       // of cache that crossed from prefill to decode
};

// From a request's start to the end of its answer, unless told otherwise.
inline constexpr absl::Duration kRequestTimeout = absl::Seconds(600);
inline absl::Status RequestTimedOut(absl::Duration timeout) {
  return absl::DeadlineExceededError(absl::StrCat(
      "no end of the answer within ", absl::FormatDuration(timeout), " (--request_timeout_s)"));
}

// Thread-safe.
class LoadBackend {
 public:
  virtual ~LoadBackend() = default;
  // Sends the request and returns when its answer has ended.  Calls `on_output` on this thread when
  // a message with output arrives, with its number of tokens (1 where that is not told).
  virtual absl::StatusOr<LoadAnswer> Send(const LoadRequest& request,
                                          const std::function<void(uint32_t)>& on_output) = 0;
};

}  // namespace cli

#endif  // CLI_LOAD_BACKEND_H_

// What a worker checks of a RequestSpec before it takes the request, and its sampling in the
// engine's words.

#ifndef WORKER_REQUEST_SPEC_H_
#define WORKER_REQUEST_SPEC_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "engine/sequence.h"

namespace ferry::v1 {
class RequestSpec;
class ResolvedSampling;
}  // namespace ferry::v1

namespace worker {

inline constexpr uint32_t kMaxBranches = 16;

struct RequestLimits {
  std::string model;  // the one served here
  int32_t vocab_size = 0;
  int32_t max_model_len = 0;  // tokens
  int32_t block_size = 0;     // tokens
  int32_t usable_blocks = 0;  // of the whole pool
};

// Errors: kInvalidArgument naming the field and the value: no tokens, a token id that the model
// does not have, a prompt that fits neither the model nor the pool, sampling out of range.
// kNotFound for another model.
absl::Status CheckRequestSpec(const ferry::v1::RequestSpec& spec, const RequestLimits& limits);

// REQUIRES: CheckRequestSpec passed.
engine::SamplingOptions ToSamplingOptions(const ferry::v1::ResolvedSampling& sampling,
                                          uint32_t branch);

}  // namespace worker

#endif  // WORKER_REQUEST_SPEC_H_

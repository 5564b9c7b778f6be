// CheckRequest: a DecodeRequest as it came over the wire -> a RequestSpec that can be run.
//
// Everything about a request that can be wrong is found here, before anything is allocated for it:
// what both workers check alike (worker/request_spec.h), and what only decoding needs.

#ifndef DECODE_WORKER_REQUEST_CHECK_H_
#define DECODE_WORKER_REQUEST_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "decode_worker/request.h"
#include "worker/request_spec.h"

namespace ferry::v1 {
class DecodeRequest;
}
namespace worker {
struct WorkerRuntime;
}

namespace decode_worker {

// What a request must fit into.
struct DecodeLimits {
  worker::RequestLimits request;
  std::string epoch;     // of this worker, 16 bytes
  int32_t max_seqs = 0;  // sequences a step
  int32_t num_penalty_slots = 0;
  int32_t num_state_slots = 0;     // 0: the model keeps no state
  int32_t max_history_tokens = 0;  // tokens that penalties can look back on
};
DecodeLimits LimitsOf(const worker::WorkerRuntime& runtime);

// Errors: kInvalidArgument naming the field and the values, kNotFound (another model),
// kFailedPrecondition / STALE_EPOCH (meant for another process).
absl::StatusOr<RequestSpec> CheckRequest(const ferry::v1::DecodeRequest& request,
                                         const DecodeLimits& limits);

}  // namespace decode_worker

#endif  // DECODE_WORKER_REQUEST_CHECK_H_

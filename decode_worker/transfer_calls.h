// What prefill workers ask of the scheduler, in plain types (transfer_service.h has the wire).
//
// Plain values.

#ifndef DECODE_WORKER_TRANSFER_CALLS_H_
#define DECODE_WORKER_TRANSFER_CALLS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/head_and_sample.h"
#include "kv_transfer/transport.h"
#include "worker/worker_service.h"

namespace decode_worker {

struct ReserveCall {
  worker::RequestId request;
  kv_transfer::Epoch sender;
  int32_t num_tokens = 0;  // of the prompt
  absl::Duration wait;     // for room
};
struct ReserveGrant {
  kv_transfer::TransferId transfer_id{};
  int32_t cached_tokens = 0;  // whole blocks that need not be sent
  int32_t num_blocks = 0;     // expected
  bool state_slot = false;    // expected too
};

// A token that P sampled.
struct FirstToken {
  int32_t branch = 0;
  kernels::SampleResult sample;
};
struct ConfirmCall {
  worker::RequestId request;
  kv_transfer::TransferId transfer_id{};
  kv_transfer::Epoch sender;
  int32_t num_blocks = 0;
  uint64_t num_bytes = 0;
  std::vector<FirstToken> first_tokens;
};

struct TransferRef {
  worker::RequestId request;
  std::optional<kv_transfer::TransferId> transfer_id;  // absent: all of the request's attempt
  kv_transfer::Epoch sender;
};

// To the sender of a transfer that ended here.
struct AbortNotice {
  worker::RequestId request;
  std::string traceparent = {};
  kv_transfer::TransferId transfer_id{};
  kv_transfer::Epoch sender;
  std::string cause;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_TRANSFER_CALLS_H_

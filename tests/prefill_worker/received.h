// Received: what one transfer brought.

#ifndef TESTS_PREFILL_WORKER_RECEIVED_H_
#define TESTS_PREFILL_WORKER_RECEIVED_H_

#include <cstddef>
#include <cstdint>
#include <future>
#include <vector>

#include "ferry/v1/kv_transfer.pb.h"
#include "kv_transfer/incoming_transfers.h"

namespace prefill_worker {

struct Received {
  std::vector<std::byte> memory;  // [num_blocks * block_bytes], of the blocks that were sent
  std::vector<std::byte> state;   // [state_slot_bytes]
  uint32_t cached_tokens = 0;
  uint32_t num_tokens = 0;
  ferry::v1::TransferDoneRequest done;
  std::promise<kv_transfer::IncomingResult> result;
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_RECEIVED_H_

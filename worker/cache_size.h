// CacheSize: how a worker's cache memory is shared between token blocks and state slots.
//
// Plain functions of numbers.

#ifndef WORKER_CACHE_SIZE_H_
#define WORKER_CACHE_SIZE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/worker_options.h"

namespace worker {

struct CacheSize {
  int32_t num_blocks = 0;       // to map, block 0 included
  int32_t num_state_slots = 0;  // to map, slot 0 included; 0: the model keeps no state
  int32_t snapshot_blocks = 0;  // between two snapshots of a prompt; 0: the model keeps no state

  // Blocks: --num_blocks, or what --cache_bytes has left beside the slots.
  // Slots: --num_state_slots, or one for each of --max_seqs sequences and snapshots every
  // snapshot_blocks blocks of the cache; within --cache_bytes at most half of it.
  // Snapshots: --snapshot_blocks, or as many blocks as weigh as much as a slot: then the snapshots
  // of a long prompt are no larger than its blocks, and what is computed again when a prompt leaves
  // a shared prefix between two of them is, on average, worth half a slot.
  // Errors: kInvalidArgument naming the sizes, if not even one block and one slot fit.
  static absl::StatusOr<CacheSize> For(const WorkerOptions& options, int64_t block_bytes,
                                       int64_t state_slot_bytes);
};

}  // namespace worker

#endif  // WORKER_CACHE_SIZE_H_

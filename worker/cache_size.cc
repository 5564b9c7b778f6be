#include "worker/cache_size.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace worker {
namespace {

constexpr int64_t kMostIds = std::numeric_limits<int32_t>::max() - 1;

int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Usable slots.
int64_t StateSlots(const WorkerOptions& options, int64_t block_bytes, int64_t slot_bytes,
                   int64_t snapshot_blocks) {
  if (options.num_state_slots > 0) return options.num_state_slots;
  const int64_t running = options.engine.limits.max_seqs;
  if (options.num_blocks > 0) return running + DivideUp(options.num_blocks, snapshot_blocks);
  const int64_t half = options.cache_bytes / 2;
  const int64_t blocks = half / block_bytes;  // at least so many will be there
  // Slot 0 comes out of the same half.
  return std::min(half / slot_bytes - 1, running + DivideUp(blocks, snapshot_blocks));
}

}  // namespace

absl::StatusOr<CacheSize> CacheSize::For(const WorkerOptions& options, int64_t block_bytes,
                                         int64_t state_slot_bytes) {
  if (state_slot_bytes == 0 && options.num_state_slots > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--num_state_slots: ", options.num_state_slots,
                     " is given, but this model keeps no state per sequence: leave the flag out"));
  }
  int64_t slots = 0;  // usable ones
  int64_t every = 0;
  int64_t left_bytes = options.cache_bytes;
  if (state_slot_bytes > 0) {
    every = options.snapshot_blocks > 0 ? options.snapshot_blocks
                                        : DivideUp(state_slot_bytes, block_bytes);
    slots = StateSlots(options, block_bytes, state_slot_bytes, every);
    if (slots > kMostIds && options.num_blocks > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--num_blocks: ", options.num_blocks, " blocks with a snapshot every ", every, " want ",
          slots, " state slots, at most ", kMostIds, " are possible"));
    }
    if (slots < 1 || slots > kMostIds) {
      return absl::InvalidArgumentError(
          absl::StrCat("--cache_bytes: ", options.cache_bytes, " bytes hold ",
                       std::max<int64_t>(slots, 0), " state slots of ", state_slot_bytes,
                       " bytes in their half, 1 to ", kMostIds, " are possible"));
    }
    left_bytes -= (slots + 1) * state_slot_bytes;
  }
  const int64_t blocks = options.num_blocks > 0 ? options.num_blocks : left_bytes / block_bytes - 1;
  if (options.num_blocks > kMostIds) {
    return absl::InvalidArgumentError(
        absl::StrCat("--num_blocks: ", options.num_blocks, " is more than ", kMostIds));
  }
  if (blocks < 1 || blocks > kMostIds) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--cache_bytes: ", options.cache_bytes, " bytes hold ", std::max<int64_t>(blocks, 0),
        " blocks of ", block_bytes, " bytes",
        slots == 0 ? "" : absl::StrCat(" beside ", slots, " state slots of ", state_slot_bytes),
        ", 1 to ", kMostIds, " are possible"));
  }
  return CacheSize{.num_blocks = static_cast<int32_t>(blocks + 1),
                   .num_state_slots = slots == 0 ? 0 : static_cast<int32_t>(slots + 1),
                   .snapshot_blocks = static_cast<int32_t>(std::min(every, kMostIds))};
}

}  // namespace worker

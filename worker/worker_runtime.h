// WorkerRuntime: what a worker's main makes before its scheduler: engine, cache memory, block pool,
// transport, epoch, and the measurements of its own speed that the router's cost needs.

#ifndef WORKER_WORKER_RUNTIME_H_
#define WORKER_WORKER_RUNTIME_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "block_hash/block_hash.h"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/prefix_reuse.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/transport.h"
#include "worker/cache_size.h"
#include "worker/worker_options.h"

namespace ferry::v1 {
class CacheGroupBytes;
class HandshakeRequest;
class HandshakeResponse;
class LayoutRecord;
class WorkerInfo;
}  // namespace ferry::v1

namespace worker {

// Start-up self-benchmark (serving.md 7.2).
struct SpeedEstimate {
  double prefill_tokens_per_s = 0;  // R: linear part
  double prefill_s_per_token2 = 0;  // A: attention part
  double decode_step_ms = 0;        // batch 1
  double decode_step_ms_per_seq = 0;
};

struct WorkerRuntime {
  WorkerOptions options;
  std::string model_name;
  std::string tokenizer_hash;
  std::string layout_fingerprint;  // 16 bytes
  kv_transfer::Epoch epoch;
  // Destroyed in reverse order: transport before the memory it has registered.  The host's memory
  // stays untouched where the engine has memory of its own.
  std::unique_ptr<engine::CacheMemory> token_blocks;
  std::unique_ptr<engine::CacheMemory> state_slots;  // null: the model keeps no state
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<engine::BlockPool> pool;
  std::unique_ptr<block_hash::BlockHasher> hasher;
  engine::SnapshotPolicy snapshots;
  std::unique_ptr<kernels::DeviceCopies> copies;  // null: the transport sees the cache itself
  std::unique_ptr<kv_transfer::Transport> transport;
  std::string cache_path = "host";  // to the links: "host", "device", "staged" (--cache_path)
  SpeedEstimate speed;

  int32_t block_size() const { return engine->cache_layout().spec().block_size; }
  int64_t block_bytes() const { return engine->cache_layout().block_bytes(); }
  // What a transport sends from and receives into; a device's memory may be the device's alone.
  absl::Span<std::byte> block(engine::BlockId id) const {
    return engine->cache().token_blocks.subspan(id * block_bytes(), block_bytes());
  }
  int64_t state_slot_bytes() const { return engine->cache_layout().spec().state_slot_bytes; }
  absl::Span<std::byte> state_slot(engine::SlotId id) const {
    return engine->cache().state_slots.subspan(id * state_slot_bytes(), state_slot_bytes());
  }
  // Usable ones; 0: the model keeps no state.
  int32_t num_state_slots() const {
    return pool->state_slots() == nullptr ? 0 : pool->state_slots()->num_slots() - 1;
  }
};

// Checks flags and their files (service/startup.h), loads the model, maps and registers the cache,
// opens the links, measures the speed.
absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options);
// The same, with the engine that `make_engine` makes instead of that of options.engine.
using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<engine::Engine>>()>;
absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options,
                                                            const EngineFactory& make_engine);

// Maps the memory for `runtime`'s engine and makes the pool and the snapshot policy over it.
absl::Status MapCache(const CacheSize& size, WorkerRuntime& runtime);
// Gives the transport the cache that MapCache has made: registered, or staged where only the device
// sees it.
absl::Status RegisterCache(WorkerRuntime& runtime);

// One group's share of cache bytes, as it is told.
void FillGroupBytes(const model::GroupBytes& group, ferry::v1::CacheGroupBytes* out);
// What GetInfo says of it, except role and state.
void FillRuntimeInfo(const WorkerRuntime& runtime, ferry::v1::WorkerInfo* info);

// The layout as it is compared before bytes move (pairing/pair_check.h).
void FillLayoutRecord(const WorkerRuntime& runtime, ferry::v1::LayoutRecord* record);

}  // namespace worker

#endif  // WORKER_WORKER_RUNTIME_H_

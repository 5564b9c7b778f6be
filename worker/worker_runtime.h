// WorkerRuntime: what a worker's main makes before its scheduler: engine, cache memory, block pool,
// transport, epoch, and the measurements of its own speed that the router's cost needs.

#ifndef WORKER_WORKER_RUNTIME_H_
#define WORKER_WORKER_RUNTIME_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "block_hash/block_hash.h"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/transport.h"
#include "worker/worker_options.h"

namespace ferry::v1 {
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
  // Destroyed in reverse order: transport before the memory it has registered.
  std::unique_ptr<engine::CacheMemory> token_blocks;
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<engine::BlockPool> pool;
  std::unique_ptr<block_hash::BlockHasher> hasher;
  std::unique_ptr<kv_transfer::Transport> transport;
  SpeedEstimate speed;

  int32_t block_size() const { return engine->cache_layout().spec().block_size; }
  int64_t block_bytes() const { return engine->cache_layout().block_bytes(); }
  absl::Span<std::byte> block(engine::BlockId id) const {
    return token_blocks->span().subspan(id * block_bytes(), block_bytes());
  }
};

// Checks flags and their files (service/startup.h), loads the model, maps and registers the cache,
// opens the links, measures the speed.
absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options);

// What GetInfo says of it, except role and state.
void FillRuntimeInfo(const WorkerRuntime& runtime, ferry::v1::WorkerInfo* info);

// The layout as it is compared before bytes move (pairing/pair_check.h).
void FillLayoutRecord(const WorkerRuntime& runtime, ferry::v1::LayoutRecord* record);

}  // namespace worker

#endif  // WORKER_WORKER_RUNTIME_H_

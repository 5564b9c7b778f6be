// The Prometheus metrics that both workers have, names ferry_... (serving.md 10.3).
//
// A gauge shows what it was last set to; the schedulers set theirs every turn.  Thread-safe.

#ifndef WORKER_WORKER_METRICS_H_
#define WORKER_WORKER_METRICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "model/cache_spec.h"

namespace prometheus {
class Registry;
}
namespace ferry::v1 {
class KvBlockCounts;
}
namespace engine {
class StateSlots;
}

namespace worker {

struct WorkerRuntime;

// Blocks, or state slots, by what they are used for; the sum is constant (block 0 and slot 0 are
// not counted).
struct BlockCounts {
  int32_t free = 0;
  int32_t cached = 0;
  int32_t active = 0;
  int32_t reserved = 0;
  int32_t held = 0;
  int32_t quarantined = 0;
};
void FillBlockCounts(const BlockCounts& counts, ferry::v1::KvBlockCounts* out);

enum class StepPhase : uint8_t { kPrefill, kDecode, kMixed };

class WorkerMetrics final {
 public:
  // Sets ferry_build_info, ferry_config_seconds and ferry_data_links{link} at once.
  WorkerMetrics(std::shared_ptr<prometheus::Registry> registry, const WorkerRuntime& runtime);
  ~WorkerMetrics();

  void SetBlocks(const BlockCounts& counts);  // ferry_kv_blocks{state}
  // ferry_state_slots{state}, where `cached` is snapshots, and ferry_state_snapshots_total{event}
  // with what `slots` has counted since start.  Only of a model that keeps a state.  Always called
  // by the same thread.
  void SetStateSlots(const BlockCounts& counts, const engine::StateSlots& slots);
  // ferry_requests_running, ferry_requests_waiting, ferry_waiting_tokens (prompt tokens not
  // computed yet)
  void SetRequests(int32_t running, int32_t waiting, uint64_t waiting_tokens);
  void SetLeases(int32_t held);  // ferry_leases
  void CountLeaseExpired();      // ferry_lease_expired_total
  // ferry_step_seconds{phase}, ferry_batch_tokens{phase}
  void ObserveStep(StepPhase phase, double seconds, int32_t tokens);
  // ferry_transfer_seconds, ferry_transfer_bytes; `groups`, what the bytes are:
  // ferry_transfer_group_bytes_total{group,kind=useful|padding}
  void ObserveTransfer(absl::Duration duration, uint64_t bytes,
                       const std::vector<model::GroupBytes>& groups);
  // ferry_transfer_link_bytes_total{link,path=host|device|shared|staged}; `link` is that of
  // Transport::LinkName.
  void CountLinkBytes(const std::string& link, uint64_t bytes);
  // ferry_transfer_failures_total{reason}: the status code's name in lower case.
  void CountTransferFailure(const absl::Status& why);
  void SetTransfersInFlight(int32_t count);         // ferry_transfer_inflight
  void CountHandshake(const absl::Status& result);  // ferry_handshake_total{result}
  // A message for a request, attempt or epoch that is not on record; `kind` is a fixed word.
  void CountLateEvent(const std::string& kind);   // ferry_late_events_total{kind}
  void CountRequest(const absl::Status& result);  // ferry_requests_total{status}
  // ferry_prompt_tokens_total{source=computed|cached|transferred}
  void CountPromptTokens(int32_t computed, int32_t cached, int32_t transferred);
  void CountGeneratedTokens(int32_t count);  // ferry_generated_tokens_total
  void CountPreemption();                    // ferry_preemptions_total

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace worker

#endif  // WORKER_WORKER_METRICS_H_

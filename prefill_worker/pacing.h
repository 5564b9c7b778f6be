// Pacing: how much a step takes on, and when a decode worker may be asked to reserve, given how
// fast this worker has turned out to be.
//
// A fast worker reserves when it schedules a prompt's first chunk and sends while it computes.  A
// slow one (a CPU with a large model) would exhaust the decode worker's patience with the whole
// transfer: it computes first.  The decode workers' limit is assumed to be our own.
//
// Owned by the scheduler thread.

#ifndef PREFILL_WORKER_PACING_H_
#define PREFILL_WORKER_PACING_H_

#include <cstdint>

#include "absl/time/time.h"

namespace prefill_worker {

class Pacing final {
 public:
  // `tokens_per_s`: the start's measurement; 0: unknown, as fast as one likes.
  // `transfer_total`: worker_options.h.
  Pacing(int32_t chunk_tokens, int32_t block_size, double tokens_per_s,
         absl::Duration transfer_total);

  // A step of `tokens` rows took `seconds`.
  void Observe(int32_t tokens, double seconds);

  // Rows of the next step: chunk_tokens, or what takes about a second, so that cancellations and
  // other commands wait no longer; at least a block.
  int32_t StepTokens() const;

  // Whether to reserve while `remaining_tokens` of the prompt are still to be computed.
  bool MayReserve(int32_t remaining_tokens) const;

 private:
  const int32_t chunk_tokens_;
  const int32_t block_size_;
  const double transfer_total_s_;
  double tokens_per_s_;
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PACING_H_

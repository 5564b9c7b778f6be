// Start-up self-benchmark: how fast this worker prefills and decodes, by a handful of real steps.

#ifndef WORKER_SPEED_BENCHMARK_H_
#define WORKER_SPEED_BENCHMARK_H_

#include "absl/status/statusor.h"
#include "engine/block_pool.h"
#include "engine/engine.h"
#include "worker/worker_runtime.h"

namespace worker {

// Runs for well under a second unless a single step of the model takes that long.  Uses blocks of
// `pool` and gives them all back, unindexed.  REQUIRES: no step in flight.
// Errors: whatever a step says.
absl::StatusOr<SpeedEstimate> MeasureSpeed(engine::Engine& engine, engine::BlockPool& pool);

}  // namespace worker

#endif  // WORKER_SPEED_BENCHMARK_H_

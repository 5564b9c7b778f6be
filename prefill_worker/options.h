// Flags of ferry-prefill besides those of every worker.

#ifndef PREFILL_WORKER_OPTIONS_H_
#define PREFILL_WORKER_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "worker/worker_options.h"

namespace prefill_worker {

struct PrefillOptions {
  worker::WorkerOptions worker;
  int32_t chunk_tokens = 512;  // --chunk_tokens: new rows a step, over all requests

  // Every problem at once, in one status.
  absl::Status Validate() const;
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_OPTIONS_H_

// Flags of ferry-decode besides those of every worker.

#ifndef DECODE_WORKER_OPTIONS_H_
#define DECODE_WORKER_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "worker/worker_options.h"

namespace decode_worker {

struct DecodeOptions {
  worker::WorkerOptions worker;
  bool role_both = false;       // --role=decode|both: may prefill prompts of any length
  int32_t chunk_tokens = 256;   // --chunk_tokens of local prefill beside running decodes
  int32_t growth_tokens = 512;  // --growth_tokens of room kept for each running sequence when
                                // another one is admitted

  // Every problem at once, in one status.
  absl::Status Validate() const;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_OPTIONS_H_

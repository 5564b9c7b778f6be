// Embed on the CPU: contract in kernels/head_and_sample.h.

#ifndef KERNELS_CPU_EMBED_H_
#define KERNELS_CPU_EMBED_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/head_and_sample.h"

namespace kernels::cpu {

// A token id outside the table gives a row of zeros.
// Errors: kInvalidArgument for a table dtype other than bf16, f16 and float32, or a scaled table.
absl::Status Embed(ThreadPool& pool, const EmbedParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_EMBED_H_

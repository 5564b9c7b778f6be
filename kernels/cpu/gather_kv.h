// GatherKv on the CPU: contract in kernels/store_kv.h.

#ifndef KERNELS_CPU_GATHER_KV_H_
#define KERNELS_CPU_GATHER_KV_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/store_kv.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes.
absl::Status GatherKv(ThreadPool& pool, const GatherKvParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_GATHER_KV_H_

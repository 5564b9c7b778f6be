// StoreKv and CopyKvEntries on the CPU: contract in kernels/store_kv.h.

#ifndef KERNELS_CPU_STORE_KV_H_
#define KERNELS_CPU_STORE_KV_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/store_kv.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes, or a stored row whose position is outside the
// rope table; nothing is written then.
absl::Status StoreKv(ThreadPool& pool, const StoreKvParams& params);

// Errors: kInvalidArgument for impossible shapes; nothing is written then.
absl::Status CopyKvEntries(ThreadPool& pool, const CopyKvEntriesParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_STORE_KV_H_

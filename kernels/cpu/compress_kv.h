// CompressKv on the CPU: contract in kernels/compress_kv.h.

#ifndef KERNELS_CPU_COMPRESS_KV_H_
#define KERNELS_CPU_COMPRESS_KV_H_

#include "absl/status/status.h"
#include "kernels/compress_kv.h"
#include "kernels/cpu/thread_pool.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible sizes, an entry without a block, or one whose position is
// outside the rope table; nothing is written then.
absl::Status CompressKv(ThreadPool& pool, const CompressKvParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_COMPRESS_KV_H_

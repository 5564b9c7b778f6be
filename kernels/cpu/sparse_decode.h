// SparseDecode and SparsePrefill on the CPU, where they are one function: contract in
// kernels/sparse_decode.h.

#ifndef KERNELS_CPU_SPARSE_DECODE_H_
#define KERNELS_CPU_SPARSE_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/sparse_decode.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes, or a row whose position is beyond the inverse
// RoPE's table; nothing is computed then.
absl::Status SparseDecode(ThreadPool& pool, const SparseDecodeParams& params);
int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t num_heads, int32_t value_dim);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_SPARSE_DECODE_H_

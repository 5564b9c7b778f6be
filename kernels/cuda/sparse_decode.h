// SparseDecode and SparsePrefill on CUDA: contract in kernels/sparse_decode.h.

#ifndef KERNELS_CUDA_SPARSE_DECODE_H_
#define KERNELS_CUDA_SPARSE_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/sparse_decode.h"

namespace kernels::cuda {

int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t max_width, int32_t num_heads,
                                   int32_t value_dim);
// A row whose position is outside the table of the inverse rotation is not rotated; Synchronize
// reports it.
absl::Status SparseDecode(const Launcher& launcher, const SparseDecodeParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_DECODE_H_

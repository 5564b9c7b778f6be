// Linear for many rows over bf16 weights, products of bf16 with float32 sums, by warpgroup products
// (gemm_tile.cuh).  A sibling of linear.cu's general product, for devices that may round
// activations to bf16.

#ifndef KERNELS_CUDA_GEMM_H_
#define KERNELS_CUDA_GEMM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/linear.h"

namespace kernels::cuda {

// The rows of `params`, normed, in bf16: where they are, or rounded to the workspace.
// REQUIRES: CanRunGemm.
absl::StatusOr<MatrixShape> GemmRows(const Launcher& launcher, const LinearParams& params,
                                     int64_t depth);

bool CanRunGemm(const LinearParams& params, const MatrixStack& weight);

// REQUIRES: CanRunGemm, CheckLinear is OK, at least one row.  The workspace holds the rows in bf16.
absl::Status Gemm(const Launcher& launcher, const LinearParams& params, const MatrixStack& weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GEMM_H_

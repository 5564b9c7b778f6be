// Linear for rows of one tile over bf16 weights, where the columns alone leave most multiprocessors
// without work: the inner dimension is cut among the blocks of a cluster, which add their sums
// through each other's shared memory, in the order of the cut.  A sibling of gemm.cu; the cut is a
// matter of the matrix, so a row's bits do not depend on the other rows.

#ifndef KERNELS_CUDA_SPLIT_GEMM_H_
#define KERNELS_CUDA_SPLIT_GEMM_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/linear.h"

namespace kernels::cuda {

bool CanSplitGemm(const Launcher& launcher, const LinearParams& params, const MatrixStack& weight);

// REQUIRES: CanSplitGemm, CheckLinear is OK.
absl::Status SplitGemm(const Launcher& launcher, const LinearParams& params,
                       const MatrixStack& weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPLIT_GEMM_H_

// HeadLinear on the CPU: contract in kernels/linear.h.

#ifndef KERNELS_CPU_HEAD_LINEAR_H_
#define KERNELS_CPU_HEAD_LINEAR_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/matrix_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// Copies each head's rows into panels of the tensor's dtype.
// Errors: kInvalidArgument if the slice does not fit the tensor, or for a dtype without a kernel.
absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(
    ThreadPool& pool, const WeightTensor& tensor, const HeadSlice& slice,
    const MatrixKernels& kernels = BestMatrixKernels());

// REQUIRES: params.weight was made by PackHeadLinear above.  The output must not overlap the input.
absl::Status HeadLinear(ThreadPool& pool, const HeadLinearParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_HEAD_LINEAR_H_

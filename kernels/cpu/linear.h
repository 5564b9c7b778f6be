// Linear on the CPU: contract in kernels/linear.h.

#ifndef KERNELS_CPU_LINEAR_H_
#define KERNELS_CPU_LINEAR_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/matrix_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// Copies the tensors, stacked by rows, into panels of their own dtypes (which may differ).  The
// copy is complete: the tensors' memory is not used afterwards. Errors: kInvalidArgument for no
// tensors, unequal columns, or a dtype without a kernel.
// A product over many rows is cut into blocks of 512 rows; within a block weights are read once.
absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
    ThreadPool& pool, absl::Span<const WeightTensor> stacked_rows,
    const MatrixKernels& kernels = BestMatrixKernels());

// REQUIRES: params.weight was made by PackLinear above.  Rows of the outputs must not overlap the
// input; epilogue_residual may be the output.
absl::Status Linear(ThreadPool& pool, const LinearParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_LINEAR_H_

// Moe on the CPU: contract in kernels/moe.h.

#ifndef KERNELS_CPU_MOE_H_
#define KERNELS_CPU_MOE_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/matrix_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/moe.h"

namespace kernels::cpu {

// Copies the experts into panels.  Routed experts share one intermediate size; a shared expert may
// have its own. Errors: kInvalidArgument for no routed expert, shapes that do not fit each other,
// or a dtype without a kernel.
absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(
    ThreadPool& pool, absl::Span<const ExpertTensors> routed,
    absl::Span<const ExpertTensors> shared, const MatrixKernels& kernels = BestMatrixKernels());

// Rows go in blocks of 512; within a block an expert's weights are read once for all its rows.
// Works in the pool's scratch (about 40 MB for a full block of the largest model): params.workspace
// is not used. REQUIRES: params.experts was made by PackExperts above.
absl::Status Moe(ThreadPool& pool, const MoeParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_MOE_H_

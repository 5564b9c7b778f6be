// The first kernel of grouped_moe.h: norm, rows in bf16, gate logits and choice.

#ifndef KERNELS_CUDA_GROUPED_ROUTE_H_
#define KERNELS_CUDA_GROUPED_ROUTE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gate.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/moe.h"

namespace kernels::cuda {

// Rows and gate are such that the kernel can read and hold them.
bool CanRouteGroups(const MoeParams& params, int64_t hidden, const MatrixStack& gate_weight);

// normed [rows, hidden] bf16, choice.ids and choice.weights, and what `params` asks for of these.
// REQUIRES: CanRouteGroups.
absl::Status RouteGroups(const Launcher& launcher, const MoeParams& params, int64_t hidden,
                         const MatrixStack& gate_weight, uint16_t* normed,
                         const ExpertChoice& choice);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GROUPED_ROUTE_H_

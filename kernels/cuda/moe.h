// Moe on CUDA: contract in kernels/moe.h.

#ifndef KERNELS_CUDA_MOE_H_
#define KERNELS_CUDA_MOE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device.h"
#include "kernels/moe.h"

namespace kernels::cuda {

absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(absl::Span<const ExpertTensors> routed,
                                                           absl::Span<const ExpertTensors> shared);

// REQUIRES: params.experts was made by PackExperts, params.gate_weight by PackLinear.
absl::Status Moe(const Launcher& launcher, const MoeParams& params);

int64_t MoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                          int64_t moe_intermediate_size, int64_t shared_intermediate_size);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_H_

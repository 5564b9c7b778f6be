// Moe for more than a few rows over experts of bf16, fp8 or fp4: rows sorted by expert, and the
// experts' products as tiles of one grid (token_tile.cuh, quantized_products.h), through which the
// weights of an expert pass once.  A sibling of moe.cu's general form, for devices that may round
// activations to bf16; moe_stream.h is the one for few rows.
//
//   route     norm, rows in bf16, gate logits, choice; sort, and a copy of the rows in sorted order
//   gate_up   activated = silu(W_gate a) * (W_up a), bf16
//   down      every pair's W_down activated, bf16
//   combine   x + weighted sum in ascending expert, the shared expert last
//
// A row's result does not depend on the other rows.

#ifndef KERNELS_CUDA_GROUPED_MOE_H_
#define KERNELS_CUDA_GROUPED_MOE_H_

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/cuda/quantized_products.h"
#include "kernels/cuda/weight_format.h"
#include "kernels/moe.h"

namespace kernels::cuda {

// One expert's matrices, or a stack of those of equal experts.
struct ExpertMaps {
  CUtensorMap gate = {};  // [intermediate, hidden]
  CUtensorMap up = {};
  CUtensorMap down = {};  // [hidden, intermediate]
  QuantizedScales gate_scales, up_scales, down_scales;
};

// The experts of a layer as the copy engine sees them.
struct GroupedExperts {
  bool mapped = false;  // they can be seen so
  ExpertFormats formats = ExpertFormats::kBfloat16;
  ExpertMaps routed;
  ExpertMaps shared;  // of the one shared expert
  int64_t num_routed = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // 0: there is none
};

// `matrices`: gate, up and down of every routed, then of every shared expert.  Not mapped unless
// all routed ones are stored alike, equal steps apart, and at most one is shared.  Errors:
// kInternal from the driver.
absl::StatusOr<GroupedExperts> MapExperts(absl::Span<const StoredMatrix> matrices,
                                          int64_t num_routed);

bool CanGroupMoe(const MoeParams& params, const GroupedExperts& experts,
                 const MatrixStack& gate_weight);
int64_t GroupedMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                 int64_t moe_intermediate_size, int64_t shared_intermediate_size);

// REQUIRES: CanGroupMoe; params.workspace has GroupedMoeWorkspaceBytes.
absl::Status GroupedMoe(const Launcher& launcher, const MoeParams& params,
                        const GroupedExperts& experts, const MatrixStack& gate_weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GROUPED_MOE_H_

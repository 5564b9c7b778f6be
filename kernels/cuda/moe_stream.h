// Moe for up to kMaxStreamTokens rows over experts of bf16, fp8 or fp4: three kernels, no
// permutation.  Weights stream through once (weight_ring.cuh); every block works out for itself
// which rows are its own. A sibling of moe.cu's general form, for devices that may round
// activations to bf16; grouped_moe.h is the one for more rows.
//
//   route    norm, gate logits and choice of every row; rows in bf16
//   gate_up  activated = silu(W_gate a) * (W_up a): a block 8 columns of an expert at a time
//   down     out = x + sum of weight * W_down activated: a block 16 columns, all experts
//
// Each sends for weights while the kernel before it runs.  A row's result does not depend on the
// other rows.

#ifndef KERNELS_CUDA_MOE_STREAM_H_
#define KERNELS_CUDA_MOE_STREAM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/cuda/weight_format.h"
#include "kernels/moe.h"

namespace kernels::cuda {

inline constexpr int32_t kMaxStreamTokens = 8;
inline constexpr int32_t kMaxSharedExperts = 4;

// One expert's weights: [intermediate, hidden] twice, [hidden, intermediate].
struct StreamExpert {
  StreamedMatrix gate;
  StreamedMatrix up;
  StreamedMatrix down;
};

// The experts of a layer in the form that streams.
struct StreamExperts {
  ExpertFormats formats = ExpertFormats::kBfloat16;
  const StreamExpert* routed = nullptr;  // [num_experts], on the device
  StreamExpert shared[kMaxSharedExperts] = {};
  int32_t num_shared = 0;
  int64_t shared_intermediate[kMaxSharedExperts] = {};
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
};

bool CanStreamMoe(const MoeParams& params, const StreamExperts& experts,
                  const MatrixStack& gate_weight);
int64_t StreamMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                int64_t moe_intermediate_size, int64_t shared_intermediate_size);

// REQUIRES: CanStreamMoe; params.workspace has StreamMoeWorkspaceBytes.
absl::Status StreamMoe(const Launcher& launcher, const MoeParams& params,
                       const StreamExperts& experts, const MatrixStack& gate_weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_STREAM_H_

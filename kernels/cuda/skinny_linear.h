// Linear for a few rows over bf16 or fp8 weights, products of bf16 with float32 sums: the weights
// stream through once, whatever bandwidth the memory has (weight_stream.cuh).  A sibling of
// linear.cu's general product, for devices that may round activations to bf16.

#ifndef KERNELS_CUDA_SKINNY_LINEAR_H_
#define KERNELS_CUDA_SKINNY_LINEAR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/linear.h"

namespace kernels::cuda {

inline constexpr int32_t kMaxSkinnyRows = 16;

bool CanRunSkinny(const LinearParams& params, const MatrixStack& weight);

// REQUIRES: CanRunSkinny, CheckLinear is OK.
absl::Status SkinnyLinear(const Launcher& launcher, const LinearParams& params,
                          const MatrixStack& weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SKINNY_LINEAR_H_

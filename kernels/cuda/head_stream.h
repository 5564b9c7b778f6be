// HeadLinear over bf16 weights, products of bf16 with float32 sums (head_stream.cuh).  A sibling of
// head_linear.cu's general product, for devices that may round activations to bf16.

#ifndef KERNELS_CUDA_HEAD_STREAM_H_
#define KERNELS_CUDA_HEAD_STREAM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/linear.h"

namespace kernels::cuda {

// `weight` [num_heads, out_features, in_features] bf16 of params.weight's sizes.
bool CanStreamHeads(const HeadLinearParams& params);
// REQUIRES: CanStreamHeads, CheckHeadLinear is OK.
absl::Status StreamHeadLinear(const Launcher& launcher, const HeadLinearParams& params,
                              const uint16_t* weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HEAD_STREAM_H_

// Embed on CUDA: contract in kernels/head_and_sample.h.

#ifndef KERNELS_CUDA_EMBED_H_
#define KERNELS_CUDA_EMBED_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/head_and_sample.h"

namespace kernels::cuda {

absl::Status Embed(const Launcher& launcher, const EmbedParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_EMBED_H_

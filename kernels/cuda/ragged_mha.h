// RaggedMha on CUDA: contract in kernels/ragged_mha.h.

#ifndef KERNELS_CUDA_RAGGED_MHA_H_
#define KERNELS_CUDA_RAGGED_MHA_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/ragged_mha.h"

namespace kernels::cuda {

absl::Status RaggedMha(const Launcher& launcher, const RaggedMhaParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_RAGGED_MHA_H_

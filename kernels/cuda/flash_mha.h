// RaggedMha of bf16 keys and values by warpgroup products: scores and weights never leave the
// registers.  A sibling of ragged_mha.cu's general form, for devices that may round queries and
// attention weights to bf16, and heads of 128 + 64 and 128.
//
// What lies past a sequence's last key is never seen.  Within the last 128 keys that a row's tile
// sees, values that are not finite reach every row of the tile.

#ifndef KERNELS_CUDA_FLASH_MHA_H_
#define KERNELS_CUDA_FLASH_MHA_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/ragged_mha.h"

namespace kernels::cuda {

bool CanRunFlashMha(const RaggedMhaParams& params);

// REQUIRES: CanRunFlashMha, CheckRaggedMha is OK, there are rows and sequences.
absl::Status FlashMha(const Launcher& launcher, const RaggedMhaParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLASH_MHA_H_

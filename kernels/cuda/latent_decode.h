// AbsorbedDecode's splits on tensor cores, for DeepSeek's latent (512 + 64) in bf16 pages: bf16
// queries, keys and weights, float32 scores and sums.  A sibling of the general SplitKernel, for
// devices that may round activations to bf16.

#ifndef KERNELS_CUDA_LATENT_DECODE_H_
#define KERNELS_CUDA_LATENT_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/absorbed_decode.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

bool CanRunLatentDecode(const AbsorbedDecodeParams& params);

// Splits that one block takes together: more where there are many, so that fewer partial results
// are written.  Depends on the batch's size only.
int32_t SplitsPerBlock(const Launcher& launcher, const AbsorbedDecodeParams& params);

// Partial results, numbered (row * max_splits_per_seq + split in its sequence / splits_per_block):
// partial_out [.., num_heads, 512], partial_lse [.., num_heads].
absl::Status LatentDecode(const Launcher& launcher, const AbsorbedDecodeParams& params,
                          int32_t splits_per_block, float* partial_out, float* partial_lse);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LATENT_DECODE_H_

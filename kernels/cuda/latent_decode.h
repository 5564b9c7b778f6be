// AbsorbedDecode on tensor cores, for DeepSeek's latent (512 + 64) in bf16 pages: bf16 queries,
// keys and weights, float32 scores and sums.  A sibling of the general SplitKernel, for devices
// that may round activations to bf16.
//
// The keys of all sequences, in tiles, are one line that the multiprocessors share evenly; the
// plan's splits are not looked at.  A block's part of a sequence gives a partial result; a second
// kernel folds these and applies W_UV.  Results are the same in every run, but where a sequence is
// cut depends on the others.

#ifndef KERNELS_CUDA_LATENT_DECODE_H_
#define KERNELS_CUDA_LATENT_DECODE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/absorbed_decode.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

inline constexpr int32_t kLatentRank = 512;

// Each place is one query vector (row, head) over some of its keys.
struct LatentPartials {
  float* out;  // [places, 512]
  float* lse;  // [places], natural log
  // [num_rows, num_heads] x: the vector's place in its first partial, y: how many partials it has,
  // each `step` places further on.
  int2* places;
  int32_t step;
};

bool CanRunLatentDecode(const AbsorbedDecodeParams& params);
int64_t LatentDecodeWorkspaceBytes(int32_t max_rows, int32_t num_heads);

// REQUIRES: CanRunLatentDecode, CheckAbsorbedDecode is OK.
absl::Status LatentDecode(const Launcher& launcher, const AbsorbedDecodeParams& params);

// latent_combine.cu: partials -> params.out, through W_UV if there is one, and lse.
absl::Status CombineLatents(const Launcher& launcher, const AbsorbedDecodeParams& params,
                            const LatentPartials& partials);
bool CanCombineLatents(const AbsorbedDecodeParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LATENT_DECODE_H_

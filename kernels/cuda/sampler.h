// Tokens from rows of logits on CUDA: penalties, filters, draw and log-probabilities, as
// kernels/head_and_sample.h says.  From the same logits it draws the tokens that the CPU draws:
// masses are integers, in units of 2^-40 of the best token's (kernels/cpu/sampler.h).

#ifndef KERNELS_CUDA_SAMPLER_H_
#define KERNELS_CUDA_SAMPLER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/head_and_sample.h"

namespace kernels::cuda {

// logits [num_samples, vocab] of each sample's row -> params.results.  `penalized` is scratch of
// the same size.  Counts are not updated.
absl::Status SampleTokens(const Launcher& launcher, const HeadAndSampleParams& params,
                          const float* logits, float* penalized);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SAMPLER_H_

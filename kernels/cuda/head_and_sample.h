// HeadAndSample on CUDA: contract in kernels/head_and_sample.h.

#ifndef KERNELS_CUDA_HEAD_AND_SAMPLE_H_
#define KERNELS_CUDA_HEAD_AND_SAMPLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/head_and_sample.h"

namespace kernels::cuda {

// A sample without a token (logits that are not numbers, no token left, parameters out of range)
// gets token 0; Synchronize reports it.
absl::Status HeadAndSample(const Launcher& launcher, const HeadAndSampleParams& params);

int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size, int32_t vocab_size);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HEAD_AND_SAMPLE_H_

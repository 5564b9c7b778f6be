// HeadAndSample on the CPU: contract in kernels/head_and_sample.h.

#ifndef KERNELS_CPU_HEAD_AND_SAMPLE_H_
#define KERNELS_CPU_HEAD_AND_SAMPLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/head_and_sample.h"

namespace kernels::cpu {

// REQUIRES: params.head was made by PackLinear (linear.h).
// Errors: kInvalidArgument for impossible shapes or sampling parameters: nothing is counted then.
absl::Status HeadAndSample(ThreadPool& pool, const HeadAndSampleParams& params);

// Enough for every call with at most so many samples and any number of logit rows.
int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size, int32_t vocab_size);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_HEAD_AND_SAMPLE_H_

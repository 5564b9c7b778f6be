// HyperPre as one kernel, for V4's four streams and a float32 matrix: a sibling of
// hyper_connection.cu's general form.

#ifndef KERNELS_CUDA_HYPER_MIX_H_
#define KERNELS_CUDA_HYPER_MIX_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/hyper_connection.h"

namespace kernels::cuda {

bool CanRunHyperMix(const HyperPreParams& params);

// REQUIRES: CanRunHyperMix, CheckHyperPre is OK, num_rows > 0.
absl::Status HyperMix(const Launcher& launcher, const HyperPreParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HYPER_MIX_H_

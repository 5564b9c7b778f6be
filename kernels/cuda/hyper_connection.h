// HyperPre and HyperPost on CUDA: contracts in kernels/hyper_connection.h.

#ifndef KERNELS_CUDA_HYPER_CONNECTION_H_
#define KERNELS_CUDA_HYPER_CONNECTION_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/hyper_connection.h"

namespace kernels::cuda {

absl::Status HyperPre(const Launcher& launcher, const HyperPreParams& params);
absl::Status HyperPost(const Launcher& launcher, const HyperPostParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HYPER_CONNECTION_H_

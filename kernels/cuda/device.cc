#include "kernels/cuda/device.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "status/status_macros.h"

namespace kernels::cuda {

absl::StatusOr<Device> OpenDevice() {
  constexpr int kFirst = 0;
  int count = 0;  // the call leaves it alone when it fails
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("device cuda: this machine has no usable NVIDIA GPU and driver (",
                     error == cudaSuccess ? "no device" : cudaGetErrorString(error), ")"));
  }
  cudaDeviceProp properties{};
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, kFirst), "asking for properties"));
  if (properties.major != 9 || properties.minor != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "device cuda: the GPU is a ", properties.name, " of compute capability ", properties.major,
        ".", properties.minor, ", and the kernels are for Hopper (9.0) only"));
  }
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(kFirst), "choosing the device"));
  return Device{.name = properties.name,
                .num_sms = properties.multiProcessorCount,
                .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
}

}  // namespace kernels::cuda

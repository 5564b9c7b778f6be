// Stands in for the backend in builds with FERRY_CUDA=OFF.

#include "absl/status/status.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_copies.h"

namespace kernels::cuda {
namespace {

absl::Status NoCuda() {
  return absl::FailedPreconditionError(
      "device cuda: this build has no CUDA backend; configure it with -DFERRY_CUDA=ON");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions&) { return NoCuda(); }

absl::StatusOr<std::unique_ptr<DeviceCopies>> CreateDeviceCopies() { return NoCuda(); }

absl::Status EnterThread() { return NoCuda(); }

}  // namespace kernels::cuda

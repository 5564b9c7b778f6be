// Stands in for the backend in builds with FERRY_CUDA=OFF.

#include "absl/status/status.h"
#include "kernels/cuda/cuda_backend.h"

namespace kernels::cuda {

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions&) {
  return absl::FailedPreconditionError(
      "device cuda: this build has no CUDA backend; configure it with -DFERRY_CUDA=ON");
}

}  // namespace kernels::cuda

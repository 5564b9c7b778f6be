// cudaError_t as absl::Status.

#ifndef KERNELS_CUDA_CUDA_STATUS_H_
#define KERNELS_CUDA_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kernels::cuda {

// kResourceExhausted for no memory, else kInternal; `what` says which call failed.
inline absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error), " (",
                                           cudaGetErrorName(error), ")");
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_CUDA_STATUS_H_

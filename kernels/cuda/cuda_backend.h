// The CUDA backend: the first GPU that CUDA shows (CUDA_VISIBLE_DEVICES), a Hopper one, float32
// activations over weights in their stored format.  kernels/<op>.h are the contracts; every shape
// that the CPU backend takes is taken here too.
//
// A null LaunchContext::stream means the backend's own stream.  What only the device can see (a
// position outside the rope table, a missing block, a logit that is not a number) is reported by
// Synchronize.

#ifndef KERNELS_CUDA_CUDA_BACKEND_H_
#define KERNELS_CUDA_CUDA_BACKEND_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace kernels::cuda {

struct CudaOptions {
  // Products may round activations and attention weights to bf16 and run on tensor cores; sums stay
  // float32.  Otherwise everything is float32, and a row's bits depend on nothing but the row.
  bool bfloat16 = false;
};

// Errors: kFailedPrecondition, one sentence that says what is missing: CUDA in this build, a
// driver, a GPU, or a GPU of the right kind.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions& options);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_CUDA_BACKEND_H_

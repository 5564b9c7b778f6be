// DeviceCopies of the GPU: a stream, and so a copy engine, for each direction.

#ifndef KERNELS_CUDA_DEVICE_COPIES_H_
#define KERNELS_CUDA_DEVICE_COPIES_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device_copies.h"

namespace kernels::cuda {

// On the GPU of CreateCudaBackend.  Errors: kFailedPrecondition in a build without CUDA, kInternal.
absl::StatusOr<std::unique_ptr<DeviceCopies>> CreateDeviceCopies();

// Makes that GPU the calling thread's own, for libraries that look for it there.
absl::Status EnterThread();

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_DEVICE_COPIES_H_

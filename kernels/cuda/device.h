// Device: the GPU that a backend runs on, and what every launch needs to know of it.

#ifndef KERNELS_CUDA_DEVICE_H_
#define KERNELS_CUDA_DEVICE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/fault.h"

namespace kernels::cuda {

inline constexpr int32_t kMaxTickets = 1024;

struct Device {
  std::string name;  // "NVIDIA H200"
  int32_t num_sms = 0;
  int64_t memory_bytes = 0;
  bool bfloat16 = false;        // see CudaOptions
  Fault* fault = nullptr;       // readable here and on the device
  uint32_t* tickets = nullptr;  // [kMaxTickets] zero between launches: counters within one
};

// Where an operation runs.
struct Launcher {
  const Device& device;
  cudaStream_t stream;
};

// The first GPU that CUDA shows, which is also every thread's current one.
// Errors: kFailedPrecondition in one sentence: no driver, no GPU, not a Hopper GPU.
absl::StatusOr<Device> OpenDevice();

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_DEVICE_H_

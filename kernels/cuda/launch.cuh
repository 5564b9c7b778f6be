// Launching a kernel, and what all kernels share of blocks and warps.

#ifndef KERNELS_CUDA_LAUNCH_CUH_
#define KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

inline constexpr int32_t kWarpSize = 32;
inline constexpr uint32_t kFullWarp = 0xffffffff;
inline constexpr size_t kMaxSharedBytes = 232448;  // of one block on Hopper

template <typename T>
__host__ __device__ constexpr T CeilDiv(T a, T b) {
  return (a + b - 1) / b;
}

struct LaunchShape {
  dim3 grid;  // a zero anywhere: nothing is launched
  int32_t threads = 0;
  size_t shared_bytes = 0;
  bool early = false;  // may start before its predecessor has finished: calls WaitForPrevious
};

// `name` is for the error.
template <typename... Params, typename... Args>
absl::Status Launch(const Launcher& launcher, const char* name, void (*kernel)(Params...),
                    const LaunchShape& shape, Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return absl::OkStatus();
  if (shape.shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return ToStatus(error, name);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<uint32_t>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = launcher.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = shape.early ? 1 : 0;
  return ToStatus(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

#if defined(__CUDACC__)

// The block's dynamic shared memory, 128-byte aligned.
__device__ inline std::byte* DynamicShared() {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  return dynamic_shared;
}

// Of a kernel launched early: every thread calls it, before it reads what an earlier kernel of the
// stream wrote or writes what one reads, and in any case.  Returns when all of them have finished;
// from then on the next kernel may start.  So when a block starts, the kernels before its
// predecessor have finished.
__device__ inline void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// Sums over the warp, in the same order in every lane.
template <typename T>
__device__ inline T WarpSum(T value) {
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// Reduces over the block's threads in a fixed order, the result in every thread.  `op` is
// associative up to rounding.  blockDim.x is a multiple of 32, at most 1024.  `scratch`: shared, 33
// elements; free to reuse when the call returns.
template <typename T, typename Op>
__device__ T BlockReduce(T value, T* scratch, Op op) {
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  const uint32_t warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) scratch[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    T total = scratch[0];
    for (uint32_t i = 1; i < blockDim.x / kWarpSize; ++i) total = op(total, scratch[i]);
    scratch[32] = total;
  }
  __syncthreads();
  const T result = scratch[32];
  __syncthreads();
  return result;
}

template <typename T>
__device__ T BlockSum(T value, T* scratch) {
  return BlockReduce(value, scratch, [](T a, T b) { return a + b; });
}

#endif

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LAUNCH_CUH_

// Counters in memory by which blocks of one grid learn that others' results are there.  What a
// thread wrote, or another one that it has met at a barrier, before AddToCount is seen after
// WaitForCount by the thread that waits, and by those that meet it at a barrier.

#ifndef KERNELS_CUDA_GRID_COUNT_CUH_
#define KERNELS_CUDA_GRID_COUNT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

__device__ inline void AddToCount(int32_t* count, int32_t by) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" : : "l"(count), "r"(by) : "memory");
}
// Returns when the count is `least` or more.  REQUIRES: those who add wait for no block that may
// not have started yet.
__device__ inline void WaitForCount(const int32_t* count, int32_t least) {
  int32_t value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  } while (value < least);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GRID_COUNT_CUH_

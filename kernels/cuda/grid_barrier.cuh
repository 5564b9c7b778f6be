// Waiting for other blocks of a grid that runs at once: at most as many blocks as there is room
// for, and no other such grid on the device at the time.

#ifndef KERNELS_CUDA_GRID_BARRIER_CUH_
#define KERNELS_CUDA_GRID_BARRIER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

__device__ inline uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Adds `count` to a counter: what the block's threads wrote before is then seen by blocks that
// wait for it.
__device__ inline void Signal(uint32_t* counter, uint32_t count) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(counter, count);
}
__device__ inline void WaitForSignals(const uint32_t* counter, uint32_t count) {
  if (threadIdx.x == 0) {
    while (LoadAcquire(counter) != count) {
    }
  }
  __syncthreads();
}

// Returns when every thread of every block has called it; what any of them wrote before is then
// seen by all.  `word` is the barriers' own, zero before the first; its upper bit turns with each
// barrier, its other bits count the blocks on the way there.
__device__ inline void WaitForGrid(uint32_t* word) {
  constexpr uint32_t kTurn = 0x80000000;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t before = atomicAdd(word, blockIdx.x == 0 ? kTurn - (gridDim.x - 1) : 1);
    while (((LoadAcquire(word) ^ before) & kTurn) == 0) {
    }
  }
  __syncthreads();
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GRID_BARRIER_CUH_

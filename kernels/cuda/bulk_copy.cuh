// The copy engine and the barriers in shared memory that count its bytes, one function an
// instruction.  A barrier's phase ends when its arrivals and its bytes are complete; waiting for
// parity p returns once the phase of that parity has ended (the first phase has parity 0).

#ifndef KERNELS_CUDA_BULK_COPY_CUH_
#define KERNELS_CUDA_BULK_COPY_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cache_policy.h"

namespace kernels::cuda {

using Barrier = uint64_t;

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void InitBarrier(Barrier* barrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}
// After InitBarrier, before the block's __syncthreads.
__device__ inline void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
__device__ inline void Arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(SharedAddress(barrier))
               : "memory");
}
// Arrives, and has the phase wait for this many bytes more.
__device__ inline void ArriveAndExpect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}
// Arrives when what this thread has sent for by CopyAsync (tensor_core.cuh) is there.
__device__ inline void ArriveAfterCopies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               :
               : "r"(SharedAddress(barrier))
               : "memory");
}
__device__ inline void WaitFor(Barrier* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

// Whether the phase of that parity has ended.
__device__ inline bool IsDone(Barrier* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// The box at (matrix, row, column) of a map (tensor_map.h) to shared memory; its bytes count
// towards the barrier.  One thread's work.
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, Barrier* barrier,
                               int32_t column, int32_t row, int32_t matrix = 0) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(SharedAddress(shared)), "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row),
        "r"(matrix)
      : "memory");
}
// The same with what the second-level cache does with the box's bytes.
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, Barrier* barrier,
                               int32_t column, int32_t row, int32_t matrix, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(SharedAddress(shared)), "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row),
        "r"(matrix), "l"(policy)
      : "memory");
}
// Between writes to memory by this thread, or by others whose it sees, and copies of it by the copy
// engine: that of who wrote, or of who sends for them.
__device__ inline void PublishToCopies() {
  asm volatile("fence.proxy.async.global;" : : : "memory");
}
__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// A ring of kStages buffers: which one is next, and the parity its barriers wait for.
template <int32_t kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_BULK_COPY_CUH_

// Blocks of a cluster and their view of each other's shared memory.

#ifndef KERNELS_CUDA_CLUSTER_CUH_
#define KERNELS_CUDA_CLUSTER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// A barrier of every thread of the cluster; what was written before it is seen after it.
__device__ inline void ClusterBarrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// What `shared` holds in the cluster's block `rank`.
__device__ inline uint32_t LoadFromRank(const uint32_t* shared, uint32_t rank) {
  uint32_t address, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_CLUSTER_CUH_

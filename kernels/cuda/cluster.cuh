// Blocks of a cluster and their view of each other's shared memory.

#ifndef KERNELS_CUDA_CLUSTER_CUH_
#define KERNELS_CUDA_CLUSTER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// A barrier of every thread of the cluster in two halves; what was written before the first is seen
// after the second.
__device__ inline void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
__device__ inline void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
__device__ inline void ClusterBarrier() {
  ArriveAtCluster();
  WaitForCluster();
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

// Addresses of a cluster's shared memory, which are numbers.
using ClusterAddress = uint32_t;
// Where the cluster's block `rank` has what `shared` is here; what lies further on lies as much
// further on there.
__device__ inline ClusterAddress AddressInRank(const void* shared, uint32_t rank) {
  ClusterAddress address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
  return address;
}
// Has the cluster's block `rank` hold `value` where `shared` is here.
__device__ inline void StoreToRank(const float* shared, uint32_t rank, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;"
               :
               : "r"(AddressInRank(shared, rank)), "f"(value)
               : "memory");
}
// Stores 16 bytes in the background; they count towards `barrier` (bulk_copy.cuh), which is in the
// same block.
__device__ inline void StoreAsync(ClusterAddress to, const uint4& words, ClusterAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(barrier)
      : "memory");
}
// Arrives at a barrier of any block, to say that something has been read; passes on no writes.
__device__ inline void ArriveInCluster(ClusterAddress barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];"
               :
               : "r"(barrier)
               : "memory");
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_CLUSTER_CUH_

// A block of SparseLatent: up to 64 heads of a row over a part of its keys.  Two warpgroups attend
// (sparse_attention.cuh), a third one gathers the keys for them (sparse_gather.cuh).

#ifndef KERNELS_CUDA_SPARSE_BLOCK_CUH_
#define KERNELS_CUDA_SPARSE_BLOCK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_latent.h"
#include "kernels/cuda/sparse_list.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kSparseValueDim = 512;
inline constexpr int32_t kSparseRope = kBoxColumns;
inline constexpr int32_t kSparseValueBoxes = kSparseValueDim / kBoxColumns;
// Boxes along a key, the rotary values in the last one: V3.2's latent has its value before them,
// V4's entry is its own value.
inline constexpr int32_t kLatentBoxes = kSparseValueBoxes + 1;
inline constexpr int32_t kSharedKvBoxes = kSparseValueBoxes;
inline constexpr int32_t kSparseHeads = kProductRows;  // of a block
inline constexpr int32_t kSparseKeys = 64;             // of a step
inline constexpr int32_t kSparseStages = 2;            // even steps, odd ones
inline constexpr int32_t kSparseSteps16 = kSparseKeys / kProductDepth;
inline constexpr int32_t kGatherThreads = kWarpgroupThreads;
inline constexpr int32_t kSparseThreads = 2 * kWarpgroupThreads + kGatherThreads;
inline constexpr int32_t kSparseProductWarps = 2 * kWarpgroupThreads / kWarpSize;
static_assert(kSparseKeys == kBoxRows && kSparseHeads == kBoxRows);

// A row's entries: number i is slots[s][i], of source s, which is the second one from first_count
// on.
struct SparseEntries {
  const int32_t* slots[2];
  int32_t first_count;
  int32_t count;
};

// Boxes are as the copy engine would have written them (tensor_map.h).
template <int32_t kBoxes>
struct SparseShared {
  uint16_t q[kBoxes][kBoxElements];
  uint16_t k[kSparseStages][kBoxes][kBoxElements];
  // From the warpgroup that weighs a step's keys to the other one, thread by thread: left operands
  // of the products with values, and what they are relative to.
  uint4 weights[kSparseSteps16][kWarpgroupThreads];
  float2 bases[kWarpgroupThreads];
  SparseEntries entries;
  RowListers<kGatherThreads>::Shared listers;
  Barrier full[kSparseStages], empty[kSparseStages];
};
inline constexpr size_t kBoxAlignment = 1024;  // bytes
static_assert(sizeof(SparseShared<kLatentBoxes>) + kBoxAlignment <= kMaxSharedBytes);

struct SparseArgs {
  SparseDecodeParams params;
  SparseList list;
  SparseParts parts;
  bool folds;  // a row's blocks are a cluster, which folds the parts
  float* values;
  int64_t row_stride;
  int64_t head_stride;
  Fault* fault;
};

// Barriers of the two warpgroups that attend.
enum SparseBarrier : int32_t { kBothGroups = 1, kFirstWeighs, kSecondWeighs };
__device__ inline void Sync(SparseBarrier barrier) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
}
// Of the one that gathers.
__device__ inline void SyncGatherers() {
  asm volatile("bar.sync 4, %0;" : : "n"(kGatherThreads) : "memory");
}
// The block's entries have been found: the one that gathers says so to the others.
__device__ inline void PassEntries() {
  asm volatile("bar.arrive 5, %0;" : : "n"(kSparseThreads) : "memory");
}
__device__ inline void WaitForEntries() {
  asm volatile("bar.sync 5, %0;" : : "n"(kSparseThreads) : "memory");
}
__device__ inline void Pass(SparseBarrier barrier) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
}

// The steps of this block: keys [begin, end) of the row's list.
struct SparsePart {
  int32_t begin;
  int32_t end;
  __device__ int32_t num_steps() const { return CeilDiv(end - begin, kSparseKeys); }
};

__device__ inline SparsePart SparsePartOf(int32_t count, int32_t part, int32_t num_parts) {
  const int32_t share = CeilDiv(CeilDiv(count, kSparseKeys), num_parts) * kSparseKeys;
  const int32_t begin = min(part * share, count);
  return {begin, min(begin + share, count)};
}

// sparse_combine.cu: parts -> the row's values.
absl::Status CombineSparseParts(const Launcher& launcher, const SparseArgs& args,
                                int32_t num_parts);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_BLOCK_CUH_

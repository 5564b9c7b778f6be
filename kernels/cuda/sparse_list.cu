#include "kernels/cuda/sparse_list.h"

#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;

// The valid indices of one source, in their order, to `slots`; returns their number in every
// thread.  `warp_counts`: shared, two rows.
__device__ int32_t ListSource(const SparseSource& source, int32_t row, int32_t* slots,
                              int32_t (&warp_counts)[2][kWarps]) {
  if (source.indices == nullptr) return 0;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t length =
      source.lengths == nullptr ? source.width : max(0, min(source.lengths[row], source.width));
  const int32_t* indices = source.indices + row * source.index_stride;
  int32_t count = 0;
  for (int32_t first = 0, turn = 0; first < length; first += kThreads, turn ^= 1) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t slot = i < length ? indices[i] : -1;
    const bool valid = slot >= 0 && slot < source.num_slots;
    const uint32_t lanes = __ballot_sync(kFullWarp, valid);
    if (lane == 0) warp_counts[turn][warp] = __popc(lanes);
    __syncthreads();
    int32_t at = count + __popc(lanes & ((1u << lane) - 1));
    for (int32_t w = 0; w < kWarps; ++w) {
      if (w < warp) at += warp_counts[turn][w];
      count += warp_counts[turn][w];
    }
    if (valid) slots[at] = slot;
  }
  __syncthreads();
  return count;
}

// One block a row.
__global__ void __launch_bounds__(kThreads)
    ListEntriesKernel(SparseDecodeParams params, SparseList list) {
  __shared__ int32_t warp_counts[2][kWarps];
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  int32_t* slots = list.slots + row * list.stride;
  const int32_t first = ListSource(params.sources[0], row, slots, warp_counts);
  const int32_t second = ListSource(params.sources[1], row, slots + first, warp_counts);
  if (threadIdx.x == 0) {
    list.counts[2 * row] = first;
    list.counts[2 * row + 1] = second;
  }
}

}  // namespace

absl::Status ListEntries(const Launcher& launcher, const SparseDecodeParams& params,
                         const SparseList& list) {
  return Launch(
      launcher, "sparse_decode list", ListEntriesKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params, list);
}

}  // namespace kernels::cuda

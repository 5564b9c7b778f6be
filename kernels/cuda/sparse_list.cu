#include "kernels/cuda/sparse_list.h"

#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kTurns = 8;  // indices of a thread that are under way at once
constexpr int32_t kChunk = kTurns * kThreads;
constexpr int32_t kCounts = kTurns * kWarps;  // of a chunk, a warp's and turn's each
static_assert(kCounts == 2 * kWarpSize);

// How many entries there are of both sources in the lower half, of the first one in the upper.
using Counts = uint32_t;
static_assert(kChunk < 1 << 16);

__device__ int32_t LengthOf(const SparseSource& source, int32_t row) {
  if (source.indices == nullptr) return 0;
  return source.lengths == nullptr ? source.width : min(source.lengths[row], source.width);
}

// One block a row, whose two lists of indices it takes as one, end to end.
__global__ void __launch_bounds__(kThreads)
    ListEntriesKernel(const __grid_constant__ SparseDecodeParams params, SparseList list) {
  __shared__ Counts counts[kCounts];
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const SparseSource& first = params.sources[0];
  const SparseSource& second = params.sources[1];
  const int32_t first_width = first.indices == nullptr ? 0 : first.width;
  const int32_t width = first_width + (second.indices == nullptr ? 0 : second.width);
  const int32_t first_length = LengthOf(first, row);
  const int32_t second_end = first_width + LengthOf(second, row);
  int32_t* slots = list.slots + row * list.stride;
  int32_t num_slots = 0, num_first = 0;
  for (int32_t begin = 0; begin < width; begin += kChunk) {
    int32_t chunk[kTurns];
    uint32_t valid[kTurns];  // lanes
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t i = begin + turn * kThreads + static_cast<int32_t>(threadIdx.x);
      chunk[turn] = -1;
      if (i < first_width) {
        chunk[turn] = first.indices[row * first.index_stride + i];
      } else if (i < width) {
        chunk[turn] = second.indices[row * second.index_stride + i - first_width];
      }
    }
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t i = begin + turn * kThreads + static_cast<int32_t>(threadIdx.x);
      const bool is_first = i < first_width;
      const bool exists = chunk[turn] >= 0 && i < (is_first ? first_length : second_end) &&
                          chunk[turn] < (is_first ? first : second).num_slots;
      valid[turn] = __ballot_sync(kFullWarp, exists);
      const uint32_t of_first = __ballot_sync(kFullWarp, exists && is_first);
      if (lane == 0) {
        counts[turn * kWarps + warp] = __popc(valid[turn]) | __popc(of_first) << 16;
      }
    }
    __syncthreads();
    // Every warp sums the counts up: a lane has two neighbours and all before them.
    const Counts own[2] = {counts[2 * lane], counts[2 * lane + 1]};
    Counts sum = own[0] + own[1];
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const Counts before = __shfl_up_sync(kFullWarp, sum, offset);
      if (lane >= offset) sum += before;
    }
    const Counts up_to[2] = {sum - own[0] - own[1], sum - own[1]};
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t at = turn * kWarps + warp;
      const Counts before = __shfl_sync(kFullWarp, up_to[warp % 2], at / 2) & 0xffff;
      if ((valid[turn] >> lane & 1) != 0) {
        slots[num_slots + before + __popc(valid[turn] & ((1u << lane) - 1))] = chunk[turn];
      }
    }
    const Counts total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    num_slots += total & 0xffff;
    num_first += total >> 16;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    list.counts[2 * row] = num_first;
    list.counts[2 * row + 1] = num_slots - num_first;
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

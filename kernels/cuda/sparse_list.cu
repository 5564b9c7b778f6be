#include "kernels/cuda/sparse_list.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_list.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

// One block a row.
__global__ void __launch_bounds__(kThreads)
    ListEntriesKernel(const __grid_constant__ SparseDecodeParams params, SparseList list) {
  __shared__ RowListers<kThreads>::Shared shared;
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const RowEntries entries = ListRow<kThreads>(
      params, row, list.slots + row * list.stride, static_cast<int32_t>(threadIdx.x),
      [] { __syncthreads(); }, shared);
  if (threadIdx.x == 0) {
    list.counts[2 * row] = entries.first_count;
    list.counts[2 * row + 1] = entries.count - entries.first_count;
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

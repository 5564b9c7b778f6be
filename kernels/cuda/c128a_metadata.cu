#include "kernels/cuda/c128a_metadata.h"

#include <limits>

#include "kernels/cuda/launch.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

// Entry j of the row's sequence as a slot; -1: it has no block.
__device__ int32_t SlotOf(const C128AMetadataParams& params, const int32_t* blocks, int32_t j) {
  const int32_t index = j / params.block_entries;
  const int64_t block = index < params.block_table_stride ? blocks[index] : -1;
  const int64_t slot = block * params.block_entries + j % params.block_entries;
  return block < 0 || slot > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(slot);
}

// One block a row.
__global__ void __launch_bounds__(kThreads)
    C128AMetadataKernel(C128AMetadataParams params, Fault* fault) {
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t position = params.positions[row];
  int32_t visible = params.slots[row] < 0 ? 0 : (position + 1) / params.tokens_per_entry;
  if (visible > params.width) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kNoBlock, params.row_to_seq[row], position);
    visible = 0;
  }
  if (threadIdx.x == 0) params.lengths[row] = visible;
  const bool is_decode = row < params.num_decode_rows;
  const int32_t* blocks =
      is_decode ? params.block_table + params.row_to_seq[row] * params.block_table_stride : nullptr;
  int32_t* indices = params.indices + row * params.index_stride;
  for (int32_t j = threadIdx.x; j < params.width; j += kThreads) {
    indices[j] = j >= visible ? -1 : is_decode ? SlotOf(params, blocks, j) : j;
  }
}

}  // namespace

absl::Status C128AMetadata(const Launcher& launcher, const C128AMetadataParams& params) {
  RETURN_IF_ERROR(CheckC128AMetadata(params));
  return Launch(
      launcher, "c128a_metadata", C128AMetadataKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params, launcher.device.fault);
}

}  // namespace kernels::cuda

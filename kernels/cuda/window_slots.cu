#include "kernels/cuda/window_slots.h"

#include "kernels/cuda/launch.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;

// One block a row.
__global__ void __launch_bounds__(kThreads)
    WindowSlotsKernel(WindowSlotsParams params, Fault* fault) {
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t seq = params.row_to_seq[row];
  const int32_t position = params.positions[row], start = params.window_start[row];
  const bool in_ring = row < params.num_ring_rows;
  const int32_t state_slot = params.state_slots[seq];
  int32_t length = 0;
  if (!in_ring || state_slot >= 0) {
    length = position + 1 - start;
    if (length < 1 || length > params.window) {
      if (threadIdx.x == 0) NoteFault(fault, FaultKind::kNoBlock, seq, position);
      length = 0;
    }
  }
  const auto slot = [&](int32_t p) {
    return in_ring ? int64_t{state_slot} * params.window + p % params.window
                   : int64_t{params.buffer_begin[seq]} + p;
  };
  if (threadIdx.x == 0) {
    params.own[row] = length == 0 ? -1 : slot(position);
    params.lengths[row] = length;
  }
  int32_t* indices = params.indices + int64_t{row} * params.width;
  for (int32_t j = static_cast<int32_t>(threadIdx.x); j < params.width; j += kThreads) {
    indices[j] = j < length ? static_cast<int32_t>(slot(start + j)) : -1;
  }
}

}  // namespace

absl::Status WindowSlots(const Launcher& launcher, const WindowSlotsParams& params) {
  RETURN_IF_ERROR(CheckWindowSlots(params));
  return Launch(
      launcher, "window_slots", WindowSlotsKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params, launcher.device.fault);
}

}  // namespace kernels::cuda

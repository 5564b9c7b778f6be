// WindowSlots on CUDA: contract in kernels/window_slots.h.

#ifndef KERNELS_CUDA_WINDOW_SLOTS_H_
#define KERNELS_CUDA_WINDOW_SLOTS_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/window_slots.h"

namespace kernels::cuda {

// A row that attends more than a window gets no entries; Synchronize reports it.
absl::Status WindowSlots(const Launcher& launcher, const WindowSlotsParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WINDOW_SLOTS_H_

// WindowSlots on the CPU: contract in kernels/window_slots.h.

#ifndef KERNELS_CPU_WINDOW_SLOTS_H_
#define KERNELS_CPU_WINDOW_SLOTS_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/window_slots.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible sizes, or a row that attends more than a window; nothing
// is written then.
absl::Status WindowSlots(ThreadPool& pool, const WindowSlotsParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_WINDOW_SLOTS_H_

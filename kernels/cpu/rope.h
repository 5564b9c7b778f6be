// Rope on the CPU: contract in kernels/store_kv.h.

#ifndef KERNELS_CPU_ROPE_H_
#define KERNELS_CPU_ROPE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/store_kv.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes or a position outside the table; nothing is
// rotated then.
absl::Status Rope(ThreadPool& pool, const RopeParams& params);

// x [rope_dim] <- R(position) x.  REQUIRES: 0 <= position < max_positions.
void Rotate(const RopeTable& rope, int32_t position, float* x);
// x <- R(-position) x.
void RotateBack(const RopeTable& rope, int32_t position, float* x);

// Errors: kInvalidArgument, naming the row, if `position` is outside the table.
absl::Status CheckPosition(const RopeTable& rope, int32_t row, int32_t position);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_ROPE_H_

// MatrixStack: up to kMaxStacked matrices with equal columns, one below the other, as one matrix.
// A view, passed to kernels by value.

#ifndef KERNELS_CUDA_MATRIX_STACK_H_
#define KERNELS_CUDA_MATRIX_STACK_H_

#include <cstdint>

#include "kernels/cuda/stored_matrix.h"

namespace kernels::cuda {

inline constexpr int32_t kMaxStacked = 8;

struct MatrixStack {
  StoredMatrix parts[kMaxStacked];
  int64_t row_end[kMaxStacked] = {};  // running totals of the parts' rows
  int32_t num_parts = 0;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MATRIX_STACK_H_

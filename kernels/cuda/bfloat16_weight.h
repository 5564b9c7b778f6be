// Bfloat16Weight: a checkpoint's fp8 matrix in bf16, its scales multiplied in: for products of bf16
// that have no form for fp8.
//
// Host memory, which the tensor points into.

#ifndef KERNELS_CUDA_BFLOAT16_WEIGHT_H_
#define KERNELS_CUDA_BFLOAT16_WEIGHT_H_

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"

namespace kernels::cuda {

struct Bfloat16Weight {
  std::vector<uint16_t> numbers;  // [rows, cols] bf16, rounded to nearest even
  WeightTensor tensor;
};

// REQUIRES: fp8 e4m3, as CheckStored has it.
Bfloat16Weight ToBfloat16(const WeightTensor& tensor);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_BFLOAT16_WEIGHT_H_

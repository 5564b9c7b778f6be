// The experts' products with many rows, all of them as tiles of one grid (token_tile.cuh).

#ifndef KERNELS_CUDA_EXPERT_PRODUCTS_H_
#define KERNELS_CUDA_EXPERT_PRODUCTS_H_

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

inline constexpr int32_t kTokenStep = 16;

// One product of all experts: the shared one's rows, and the slots of the routed ones, sorted by
// expert.
struct ExpertProduct {
  CUtensorMap tokens = {};  // [slots, depth], in boxes of kTokenStep rows
  CUtensorMap first = {};   // gate, or down; of all routed experts
  CUtensorMap second = {};  // up, or down
  CUtensorMap shared_tokens = {};
  CUtensorMap shared_first = {};
  CUtensorMap shared_second = {};
  const int32_t* count = nullptr;  // [num_experts] slots
  int32_t* num_drawn = nullptr;    // 0; the grid's own from then on
  int32_t num_experts = 0;
  int64_t num_slots = 0;
  int32_t shared_rows = 0;  // 0: no shared expert
  int64_t depth = 0;
  int64_t shared_depth = 0;
  int64_t columns = 0;
  int64_t shared_columns = 0;
  float swiglu_limit = 0;
  bool rows_stay = false;          // in the second-level cache: weights there give way to them
  uint16_t* out = nullptr;         // [slots, columns]
  uint16_t* shared_out = nullptr;  // [rows, shared_columns]
};

// out = a first^T, or with `swiglu` silu(a first^T) * (a second^T), every column of both; bf16.
absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProduct& product, bool swiglu);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_EXPERT_PRODUCTS_H_

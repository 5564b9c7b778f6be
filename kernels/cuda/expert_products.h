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
// expert.  out = a first^T, or as the first of the two silu(a first^T) * (a second^T), every column
// of both; bf16.
struct ExpertProduct {
  CUtensorMap tokens = {};  // [slots, depth], in boxes of kTokenStep rows
  CUtensorMap first = {};   // gate, or down; of all routed experts
  CUtensorMap second = {};  // up, or down
  CUtensorMap shared_tokens = {};
  CUtensorMap shared_first = {};
  CUtensorMap shared_second = {};
  const int32_t* count = nullptr;  // [num_experts] slots
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

// Both products of a layer, the second of the first one's results: of the same slots and rows.
struct ExpertProducts {
  ExpertProduct gate_up;
  ExpertProduct down;
  const int32_t* ids =
      nullptr;  // [num_slots] chosen experts, to be counted; null: there is `count`
  // The grid's own, zeros when it starts.
  int32_t* num_drawn = nullptr;   // tiles
  int32_t* num_stored = nullptr;  // [num_experts + 1] warps' parts of gate_up's tiles; shared: last
};

absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProducts& products);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_EXPERT_PRODUCTS_H_

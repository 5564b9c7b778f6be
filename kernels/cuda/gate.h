// Choosing experts on CUDA, and sorting the choices by expert.

#ifndef KERNELS_CUDA_GATE_H_
#define KERNELS_CUDA_GATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/moe.h"

namespace kernels::cuda {

// What a gate chose for some rows.  A slot is one (expert, row) pair; slots are sorted by expert,
// then row.
struct ExpertChoice {
  int32_t num_rows = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t* ids = nullptr;           // [num_rows, top_k], ascending
  float* weights = nullptr;         // [num_rows, top_k]
  int32_t* count = nullptr;         // [num_experts] slots of an expert
  int32_t* slot_row = nullptr;      // [num_rows * top_k]
  int32_t* slot_of_pair = nullptr;  // [num_rows, top_k]

  constexpr int32_t num_slots() const { return num_rows * top_k; }
};

// logits [num_rows, num_experts] -> choice.ids and choice.weights, as params' gate, bias and expert
// table say, and params' topk_ids and topk_weights if it asks for them.  REQUIRES: CheckMoe is OK.
absl::Status SelectExperts(const Launcher& launcher, const MoeParams& params, const float* logits,
                           const ExpertChoice& choice);

// choice.ids -> count, slot_row and slot_of_pair.
absl::Status SortByExpert(const Launcher& launcher, const ExpertChoice& choice);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GATE_H_

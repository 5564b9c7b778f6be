// Choosing and weighing a row's experts by its gate logits: models.md 5.1-5.3, 7.8.

#ifndef KERNELS_CPU_GATE_H_
#define KERNELS_CPU_GATE_H_

#include <cstdint>

#include "kernels/moe.h"

namespace kernels::cpu {

// Chooses top_k experts for one row; ties go to the lower id.  `ids` ascend.
// REQUIRES: CheckGate(gate).ok().
void SelectExperts(const GateConfig& gate, const float* logits /* [num_experts] */,
                   const float* bias /* [num_experts]; may be null: zero; methods that have one */,
                   int32_t* ids /* [top_k] */, float* weights /* [top_k] */);

// The weights of experts that a table chose (V4's hash layers).  `ids` ascend.
// REQUIRES: CheckGate(gate).ok(), chosen ids are different and below num_experts.
void WeighExperts(const GateConfig& gate, const float* logits /* [num_experts] */,
                  const int32_t* chosen /* [top_k] */, int32_t* ids /* [top_k] */,
                  float* weights /* [top_k] */);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_GATE_H_

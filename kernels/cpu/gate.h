// Choosing a row's experts from its gate logits: models.md 5.1-5.3.

#ifndef KERNELS_CPU_GATE_H_
#define KERNELS_CPU_GATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/moe.h"

namespace kernels::cpu {

inline constexpr int32_t kMaxExperts = 1024;

// Errors: kInvalidArgument if top_k experts cannot be chosen so, or for more than kMaxExperts.
absl::Status CheckGate(const GateConfig& gate);

// Chooses top_k experts for one row; ties go to the lower id.  `ids` ascend.
// REQUIRES: CheckGate(gate).ok().
void SelectExperts(const GateConfig& gate, const float* logits /* [num_experts] */,
                   const float* bias /* [num_experts]; may be null: zero; kNoAuxTc only */,
                   int32_t* ids /* [top_k] */, float* weights /* [top_k] */);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_GATE_H_

// StepView: a step in progress, as the parts of a network see it.
//
// Plain view; lives as long as one Forward.

#ifndef MODEL_STEP_VIEW_H_
#define MODEL_STEP_VIEW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"
#include "model/network.h"
#include "model/step_plan.h"

namespace model {

struct StepView {
  const kernels::LaunchContext& context;
  const StepPlan& plan;
  const StepState& state;
  const StepOutput& output;
  const std::byte* device_plan;  // the plan's bytes on the device
  std::byte* linear_workspace;   // of every Linear, one after the other

  int32_t num_tokens() const { return plan.counts().num_tokens; }
  int32_t num_absorbed_tokens() const { return plan.counts().num_absorbed_tokens; }

  // Rows of the absorbed sequence that has most.
  int32_t max_absorbed_q_len() const {
    int32_t max = 0;
    for (int32_t seq = 0; seq < plan.counts().num_absorbed_seqs; ++seq) {
      max = std::max(max, plan.cu_seqlens_q[seq + 1] - plan.cu_seqlens_q[seq]);
    }
    return max;
  }

  // Where the device has what the plan has at `host`.
  template <typename T>
  const T* OnDevice(const T* host) const {
    const auto offset = reinterpret_cast<const std::byte*>(host) - plan.bytes().data();
    return reinterpret_cast<const T*>(device_plan + offset);
  }
};

}  // namespace model

#endif  // MODEL_STEP_VIEW_H_

// What the kernels of moe_stream.h hand to each other.

#ifndef KERNELS_CUDA_MOE_STREAM_ARGS_H_
#define KERNELS_CUDA_MOE_STREAM_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/moe_stream.h"

namespace kernels::cuda {

struct alignas(16) ActiveExpert {
  StreamExpert weights;
  int32_t count;  // of its rows; 0: there are no more such experts
};

struct MoeStreamWorkspace {
  uint16_t* normed;            // [rows, hidden] bf16
  float* logits;               // [rows, experts]
  int32_t* ids;                // [rows, top_k]
  float* weights;              // [rows, top_k]
  ActiveExpert* active;        // [bound] the experts that have rows, ascending
  int32_t* active_pairs;       // [bound, rows] pairs (row * top_k + i) of each, ascending
  uint16_t* activated;         // [rows * top_k, intermediate] bf16, by pair
  uint16_t* shared_activated;  // per shared expert [rows, its intermediate]
};

struct MoeStreamArgs {
  StreamExperts experts;
  MoeStreamWorkspace work = {};
  int32_t num_rows;
  int32_t num_experts;
  int32_t top_k;
  int32_t bound;  // of active experts
  float swiglu_limit;
  const float* input;  // null: no residual
  int64_t input_row_stride;
  float* output;
  int64_t output_row_stride;
};

// A gate for which gate_up's blocks choose themselves (moe_choice.cuh): each of the first has
// kBlockExperts of its rows, a thread 8 columns.
inline constexpr int32_t kBlockExperts = 8;
inline constexpr int32_t kMaxChoiceExperts = 64;
inline constexpr int32_t kMaxChoiceTopK = 8;
struct GateArgs {
  MoeParams params;
  const uint16_t* weight = nullptr;  // [num_experts, hidden] bf16; null: the rows are routed
  uint32_t* logits = nullptr;        // [rows, kMaxChoiceExperts] zero between operations
};

// moe_route.cu: normed, ids, weights, and the active experts.
absl::Status RouteRows(const Launcher& launcher, const MoeParams& params,
                       const MatrixStack& gate_weight, const MoeStreamArgs& args);
// moe_gate_up.cu: activated and shared_activated; if it chooses, weights and the active experts.
absl::Status StreamGateUp(const Launcher& launcher, const MoeStreamArgs& args,
                          const GateArgs& gate);
size_t GateUpSharedBytes(const MoeStreamArgs& args);
// moe_down.cu: output; sets the gate's published logits back to zero.
absl::Status StreamDown(const Launcher& launcher, const MoeStreamArgs& args, const GateArgs& gate);
size_t DownSharedBytes(const MoeStreamArgs& args);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_STREAM_ARGS_H_

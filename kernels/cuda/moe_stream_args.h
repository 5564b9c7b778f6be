// What the kernels of moe_stream.h hand to each other.

#ifndef KERNELS_CUDA_MOE_STREAM_ARGS_H_
#define KERNELS_CUDA_MOE_STREAM_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/moe_stream.h"

namespace kernels::cuda {

struct ActiveExpert {
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
  CachePolicy weight_policy = kEvictFirst;
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

// moe_route.cu: normed, ids, weights, and the active experts.
bool CanRoute(const MoeParams& params, const MatrixStack& gate_weight);
absl::Status RouteRows(const Launcher& launcher, const MoeParams& params,
                       const MatrixStack& gate_weight, const MoeStreamArgs& args);
size_t RouteSharedBytes(const MoeStreamArgs& args);
// moe_gate_up.cu: activated and shared_activated.
absl::Status StreamGateUp(const Launcher& launcher, const MoeStreamArgs& args);
size_t GateUpSharedBytes(const MoeStreamArgs& args);
// moe_down.cu: output.
absl::Status StreamDown(const Launcher& launcher, const MoeStreamArgs& args);
size_t DownSharedBytes(const MoeStreamArgs& args);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_STREAM_ARGS_H_

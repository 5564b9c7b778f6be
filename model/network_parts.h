// What the networks of every family are made of, besides attention: scratch, RoPE tables, and the
// steps of Forward before, between and after the attention layers.
//
// Free functions over a StepView; each launches on its context and returns the backend's error.

#ifndef MODEL_NETWORK_PARTS_H_
#define MODEL_NETWORK_PARTS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/scratch_carver.h"
#include "model/config.h"
#include "model/network.h"
#include "model/step_view.h"
#include "model/weights.h"

namespace model {

using kernels::ScratchCarver;

// cos and sin of `rope` on the device, for positions [0, max_positions).
struct DeviceRope {
  DeviceVector cos;  // [max_positions, rope_dim / 2]
  DeviceVector sin;
  kernels::RopeTable table;
};
absl::StatusOr<DeviceRope> UploadRope(const RopeConfig& rope, int32_t rope_dim,
                                      int32_t max_positions, kernels::Backend& backend);

// Errors: kInvalidArgument naming the option that does not fit the model.
absl::Status CheckNetworkOptions(const NetworkOptions& options, const ModelConfig& config);

// Rows of float32 as an operation's input.
kernels::Activation FloatRows(float* data, int64_t row_stride);

// The plan's copy-on-write blocks.
absl::Status CopyPlannedBlocks(kernels::Backend& backend, const kernels::LaunchContext& context,
                               const StepPlan& plan, const StepState& state, int64_t block_bytes);

// Host array -> device.
template <typename T>
absl::Status UploadSpan(kernels::Backend& backend, const kernels::LaunchContext& context,
                        absl::Span<const T> host, T* device) {
  return backend.CopyToDevice(
      context, reinterpret_cast<std::byte*>(device),
      {reinterpret_cast<const std::byte*>(host.data()), host.size() * sizeof(T)});
}

// Rows of the embedding -> output [num_tokens, table.cols].
absl::Status EmbedTokens(kernels::Backend& backend, const StepView& step,
                         const kernels::WeightTensor& table, float* output);

// hidden += W_down( silu(W_gate a) * W_up a ), a = norm(hidden).  hidden [num_tokens, hidden],
// activated [num_tokens, intermediate] is scratch.
absl::Status DenseMlp(kernels::Backend& backend, const StepView& step, const MlpWeights& weights,
                      double norm_eps, float* hidden, float* activated);

// hidden += experts(norm(hidden)).  hidden [num_tokens, hidden_size].
absl::Status MixtureOfExperts(kernels::Backend& backend, const StepView& step,
                              const MlpWeights& weights, const ModelConfig& config, float* hidden,
                              std::byte* workspace);

// The plan's samples and logit rows, from hidden [num_tokens, hidden_size].
absl::Status HeadAndSample(kernels::Backend& backend, const StepView& step,
                           const EndWeights& weights, const ModelConfig& config,
                           const float* hidden, std::byte* workspace);

}  // namespace model

#endif  // MODEL_NETWORK_PARTS_H_

// DeepseekV4: the network of deepseek_v4: a residual of hc_mult parallel streams, attention over a
// window and compressed entries (deepseek_v4_attention.h), a mixture of experts in every layer.
//
// The streams and all activations are float32.  Sources: DeepSeek-V4 paper, models.md 7.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_DEEPSEEK_V4_H_
#define MODEL_DEEPSEEK_V4_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/deepseek_v4_attention.h"
#include "model/deepseek_v4_weights.h"
#include "model/network.h"
#include "model/step_view.h"

namespace model {

class DeepseekV4 final : public Network {
 public:
  // `backend` must outlive the network.
  static absl::StatusOr<std::unique_ptr<DeepseekV4>> Create(ModelConfig config, V4Weights weights,
                                                            std::string weights_digest,
                                                            const NetworkOptions& options,
                                                            kernels::Backend& backend);

  const ModelConfig& config() const override { return config_; }
  const CacheLayout& cache_layout() const override { return attention_.cache_layout(); }
  const std::string& weights_digest() const override { return weights_digest_; }
  int64_t weight_bytes() const override { return weights_.bytes; }
  int64_t skipped_tensors() const override { return weights_.skipped_tensors; }
  int32_t max_model_len() const override { return max_model_len_; }

  absl::Status Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                       const StepState& state, const StepOutput& output) override;

 private:
  // Device arrays, rows of the step first.
  struct Scratch {
    std::byte* plan = nullptr;     // the plan's bytes
    int32_t* token_ids = nullptr;  // [max_tokens], sampled ones too
    float* streams = nullptr;      // [max_tokens, hc_mult, hidden]
    float* mixes = nullptr;        // [max_tokens, hc_mult * (2 + hc_mult)]
    float* post = nullptr;         // [max_tokens, hc_mult]
    float* comb = nullptr;         // [max_tokens, hc_mult, hc_mult]
    float* input = nullptr;        // [max_tokens, hidden], of a block
    float* output = nullptr;       // the same
    std::byte* linear_workspace = nullptr;
    std::byte* moe_workspace = nullptr;
    std::byte* head_workspace = nullptr;
  };

  DeepseekV4(ModelConfig config, V4Weights weights, std::string weights_digest,
             const NetworkOptions& options, kernels::Backend& backend);
  absl::Status Allocate();
  int64_t CarveScratch(std::byte* base);

  absl::Status EmbedStreams(const StepView& step);
  // streams -> input; with `mix_back`, post and comb of the same site.
  absl::Status Collapse(const StepView& step, const StreamMixWeights& mix, bool mix_back);
  // streams <- output and streams.
  absl::Status MixBack(const StepView& step);
  // output = experts(norm(input)).
  absl::Status Experts(const StepView& step, const V4ExpertWeights& weights);

  const ModelConfig config_;
  const V4Weights weights_;
  const std::string weights_digest_;
  const NetworkOptions options_;
  const int32_t max_model_len_;
  kernels::Backend& backend_;
  DeepseekV4Attention attention_;
  std::unique_ptr<kernels::Buffer> scratch_memory_;
  Scratch scratch_;
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V4_H_

// DeepseekV2: the network of deepseek_v2 and deepseek_v3 (dense MLA, SwiGLU MLP or MoE).  The
// families differ in their config only: gate, RoPE factor, q LoRA, number formats.
//
// The residual stream and all activations are float32.  network.h says where the cache is written
// and read.  Sources: DeepSeek-V2 paper 2.1, models.md 3-5.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_DEEPSEEK_V2_H_
#define MODEL_DEEPSEEK_V2_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/network.h"
#include "model/prefill_pieces.h"
#include "model/weights.h"

namespace model {

class DeepseekV2 final : public Network {
 public:
  // `backend` must outlive the network.
  static absl::StatusOr<std::unique_ptr<DeepseekV2>> Create(ModelConfig config, Weights weights,
                                                            std::string weights_digest,
                                                            const NetworkOptions& options,
                                                            kernels::Backend& backend);

  const ModelConfig& config() const override { return config_; }
  const CacheLayout& cache_layout() const override { return cache_layout_; }
  const std::string& weights_digest() const override { return weights_digest_; }
  int64_t weight_bytes() const override { return weights_.bytes; }
  int64_t skipped_tensors() const override { return weights_.skipped_tensors; }
  int32_t max_model_len() const override { return max_model_len_; }

  absl::Status Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                       const StepState& state, const StepOutput& output) override;

 private:
  // Device arrays that a step computes in, rows of the step first.
  struct Scratch {
    float* hidden = nullptr;          // [max_tokens, hidden], the residual stream
    float* q_a = nullptr;             // [max_tokens, q_lora_rank]
    float* q = nullptr;               // [max_tokens, H, nope + rope]
    float* kv_a = nullptr;            // [max_tokens, kv_lora_rank + rope]
    float* q_latent = nullptr;        // [max_tokens, H, kv_lora_rank]
    float* attention = nullptr;       // [max_tokens, H, v]
    float* lse = nullptr;             // [H, max_tokens]
    float* mlp = nullptr;             // [max_tokens, intermediate]
    float* piece_latent = nullptr;    // [piece_tokens, kv_lora_rank]
    float* piece_k_rope = nullptr;    // [piece_tokens, rope]
    float* piece_kv = nullptr;        // [piece_tokens, H, nope + v]
    std::byte* plan = nullptr;        // the plan's bytes
    int32_t* cu_seqlens_q = nullptr;  // the arrays of PrefillPieces
    int32_t* cu_seqlens_kv = nullptr;
    int32_t* causal_offset = nullptr;
    int32_t* q_row_begin = nullptr;
    int64_t* slots = nullptr;
    std::byte* decode_workspace = nullptr;
    std::byte* moe_workspace = nullptr;
    std::byte* head_workspace = nullptr;
  };
  // A step in progress.
  struct Step {
    const kernels::LaunchContext& context;
    const StepPlan& plan;
    const StepState& state;
    const StepOutput& output;
    int32_t num_tokens;
    int32_t num_absorbed_tokens;

    // Where the device has what the plan has at `host`.
    template <typename T>
    const T* OnDevice(const T* host) const {
      const auto offset = reinterpret_cast<const std::byte*>(host) - plan.bytes().data();
      return reinterpret_cast<const T*>(device_plan + offset);
    }
    const std::byte* device_plan;
  };

  DeepseekV2(ModelConfig config, Weights weights, std::string weights_digest,
             const NetworkOptions& options, kernels::Backend& backend);
  absl::Status Allocate();
  // Sets the pointers of scratch_ within `base` (null: only measures) and returns the size.
  int64_t CarveScratch(std::byte* base);

  absl::Status Upload(const Step& step);
  absl::Status Embed(const Step& step);
  absl::Status Attention(const Step& step, int32_t layer);
  absl::Status ProjectQueryAndLatent(const Step& step, const AttentionWeights& weights);
  absl::Status StoreLatents(const Step& step, const AttentionWeights& weights, int32_t layer);
  absl::Status AttendAbsorbed(const Step& step, const AttentionWeights& weights, int32_t layer);
  absl::Status AttendRagged(const Step& step, const AttentionWeights& weights, int32_t layer);
  absl::Status DecompressPiece(const Step& step, const AttentionWeights& weights, int32_t layer,
                               const PiecePass& pass);
  absl::Status ProjectOutput(const Step& step, const AttentionWeights& weights);
  absl::Status DenseMlp(const Step& step, const MlpWeights& weights);
  absl::Status MixtureOfExperts(const Step& step, const MlpWeights& weights);
  absl::Status HeadAndSample(const Step& step);

  const ModelConfig config_;
  const Weights weights_;
  const std::string weights_digest_;
  const NetworkOptions options_;
  const int32_t max_model_len_;
  const CacheLayout cache_layout_;
  kernels::Backend& backend_;
  PrefillPieces pieces_;
  DeviceVector rope_cos_;  // [max_model_len, rope / 2]
  DeviceVector rope_sin_;
  kernels::RopeTable rope_;
  std::unique_ptr<kernels::Buffer> scratch_memory_;
  Scratch scratch_;
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V2_H_

// MlaNetwork: what the networks with multi-head latent attention share: V2 and V3 (deepseek_v2.h),
// V3.2 (deepseek_v32.h).  A layer is Attention, which each of them arranges from the parts here and
// its own, then a SwiGLU MLP or a mixture of experts.
//
// The residual stream and all activations are float32.  network.h says where the cache is written
// and read.  Sources: DeepSeek-V2 paper 2.1, models.md 3-5.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_MLA_NETWORK_H_
#define MODEL_MLA_NETWORK_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "model/network.h"
#include "model/network_parts.h"
#include "model/prefill_pieces.h"
#include "model/step_view.h"
#include "model/weights.h"

namespace model {

class MlaNetwork : public Network {
 public:
  const ModelConfig& config() const override { return config_; }
  const CacheLayout& cache_layout() const override { return cache_layout_; }
  const std::string& weights_digest() const override { return weights_digest_; }
  int64_t weight_bytes() const override { return weights_.bytes; }
  int64_t skipped_tensors() const override { return weights_.skipped_tensors; }
  int32_t max_model_len() const override { return max_model_len_; }

  absl::Status Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                       const StepState& state, const StepOutput& output) override;

 protected:
  static constexpr int32_t kLatentGroup = 0;  // of the cache

  // Device arrays that a step computes in, rows of the step first.
  struct Scratch {
    float* hidden = nullptr;            // [max_tokens, hidden], the residual stream
    float* q_a = nullptr;               // [max_tokens, q_lora_rank]
    float* q = nullptr;                 // [max_tokens, H, nope + rope]
    float* kv_a = nullptr;              // [max_tokens, kv_lora_rank + rope]
    float* q_latent = nullptr;          // [max_latent_rows, H, kv_lora_rank]
    float* attention = nullptr;         // [max_tokens, H, v], or of the same in bf16
    float* lse = nullptr;               // [H, max_tokens]
    float* mlp = nullptr;               // [max_tokens, intermediate]
    std::byte* piece_latent = nullptr;  // [piece_tokens, kv_lora_rank], these in kv_dtype_
    std::byte* piece_k_rope = nullptr;  // [piece_tokens, rope]
    std::byte* piece_kv = nullptr;      // [piece_tokens, H, nope + v]
    std::byte* plan = nullptr;          // the plan's bytes
    int32_t* cu_seqlens_q = nullptr;    // the arrays of PrefillPieces
    int32_t* cu_seqlens_kv = nullptr;
    int32_t* causal_offset = nullptr;
    int32_t* q_row_begin = nullptr;
    int64_t* slots = nullptr;
    std::byte* linear_workspace = nullptr;
    std::byte* moe_workspace = nullptr;
    std::byte* head_workspace = nullptr;
  };

  // `ragged_positions`: ragged rows from this position on are left to Attention.
  MlaNetwork(ModelConfig config, Weights weights, std::string weights_digest,
             const NetworkOptions& options, kernels::Backend& backend,
             int32_t ragged_positions = std::numeric_limits<int32_t>::max());

  // After construction.
  absl::Status Allocate();

  // Rows that may be in scratch().q_latent at a time.
  virtual int64_t max_latent_rows() const = 0;
  // Takes what the derived class needs besides Scratch.
  virtual void CarveMore(ScratchCarver& carver) = 0;
  // Before the first layer of a step.
  virtual void PrepareStep(const StepPlan& plan) { static_cast<void>(plan); }
  // hidden += attention(norm(hidden)).
  virtual absl::Status Attention(const StepView& step, int32_t layer) = 0;

  // hidden -> q and kv_a as they are; q_a, where the model has it, before its norm.  `more` takes
  // the further columns of q_kv_a.
  absl::Status ProjectQueryAndLatent(const StepView& step, const AttentionWeights& weights,
                                     absl::Span<const kernels::OutputSegment> more = {});
  // The one place where the cache is written.  q's rotary part is rotated, too, and the first
  // `num_absorbed` rows are absorbed.
  absl::Status StoreCache(const StepView& step, const AttentionWeights& weights, int32_t layer,
                          int32_t num_absorbed, const kernels::IndexKeyParams& index_key = {});
  // q_nope of rows [begin, begin + count) through W_UK into q_latent's rows [0, count).
  kernels::HeadLinearParams Absorption(const AttentionWeights& weights, int32_t begin,
                                       int32_t count) const;
  // Ragged sequences' rows before ragged_positions: keys and values are decompressed from the
  // stored latents piece by piece, and attended with their heads (models.md 4.2).
  // `rounded`: attention in bf16.
  absl::Status AttendRagged(const StepView& step, const AttentionWeights& weights, int32_t layer,
                            bool rounded);
  // hidden += W_o attention.
  absl::Status ProjectOutput(const StepView& step, const AttentionWeights& weights, bool rounded);
  // Whether the step's attention is best left in bf16: W_o rounds it, and no piece is added to an
  // earlier one.
  bool RoundsAttention(const StepView& step, const AttentionWeights& weights) const;
  // The two forms of attention: null, the one that is not `rounded`.
  float* exact_attention(bool rounded) const { return rounded ? nullptr : scratch_.attention; }
  uint16_t* rounded_attention(bool rounded) const {
    return rounded ? reinterpret_cast<uint16_t*>(scratch_.attention) : nullptr;
  }

  kernels::KvPages LatentPages(const StepView& step, int32_t layer) const {
    return cache_layout_.Pages(step.state.cache, kLatentGroup, layer);
  }
  int64_t q_row_stride() const {
    return int64_t{config_.num_attention_heads} * config_.qk_head_dim();
  }
  const Weights& weights() const { return weights_; }
  const NetworkOptions& options() const { return options_; }
  kernels::Backend& backend() const { return backend_; }
  const Scratch& scratch() const { return scratch_; }
  const kernels::RopeTable& rope() const { return rope_.table; }

 private:
  // Sets the pointers of scratch_ within `base` (null: only measures) and returns the size.
  int64_t CarveScratch(std::byte* base);
  absl::Status UploadStep(const StepView& step);
  absl::Status DecompressPiece(const StepView& step, const AttentionWeights& weights, int32_t layer,
                               const PiecePass& pass);

  const ModelConfig config_;
  const Weights weights_;
  const std::string weights_digest_;
  const NetworkOptions options_;
  const int32_t max_model_len_;
  const CacheLayout cache_layout_;
  kernels::Backend& backend_;
  const kernels::DType kv_dtype_;  // of what is decompressed
  const int32_t piece_tokens_;
  PrefillPieces pieces_;
  DeviceRope rope_;
  std::unique_ptr<kernels::Buffer> scratch_memory_;
  Scratch scratch_;
};

}  // namespace model

#endif  // MODEL_MLA_NETWORK_H_

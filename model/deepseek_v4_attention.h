// DeepseekV4Attention: the attention layers of V4: a sliding window in every layer, and in most the
// compressed entries of everything before (models.md 7.3-7.6).
//
//   window only   the last sliding_window tokens
//   CSA           and the index_topk best entries of csa_ratio tokens
//   HCA           and all entries of hca_ratio tokens
//
// Within a layer the new rows' window entries, compressed entries and index keys are stored first;
// attention then reads the stored form of everything, so how rows are cut into steps changes no
// bit. deepseek_v4_layout.h says where they lie, window_plan.h how a chunk sees its window.
//
// Thread-compatible: one executor thread makes every call after Allocate.

#ifndef MODEL_DEEPSEEK_V4_ATTENTION_H_
#define MODEL_DEEPSEEK_V4_ATTENTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "model/cache_spec.h"
#include "model/deepseek_v4_layout.h"
#include "model/deepseek_v4_weights.h"
#include "model/network_parts.h"
#include "model/step_view.h"
#include "model/window_plan.h"

namespace model {

class DeepseekV4Attention final {
 public:
  // `config` and `backend` must outlive it.
  DeepseekV4Attention(const ModelConfig& config, const NetworkOptions& options,
                      int32_t max_model_len, kernels::Backend& backend);

  const CacheLayout& cache_layout() const { return cache_layout_; }

  absl::Status UploadRopes();
  void CarveScratch(ScratchCarver& carver);

  // Once a step, when the plan's bytes are on the device.
  absl::Status BeginStep(const StepView& step);
  // output = attention(norm(input)), both [num_tokens, hidden].
  absl::Status Attend(const StepView& step, const V4AttentionWeights& weights, int32_t layer,
                      float* input, float* output);

 private:
  // Device arrays, rows of the step first.
  struct Scratch {
    float* q_a = nullptr;            // [max_tokens, q_lora_rank]
    float* q = nullptr;              // [max_tokens, H, head_dim]
    float* kv = nullptr;             // [max_tokens, head_dim]
    float* entry_kv = nullptr;       // [max_tokens, 2 * head_dim], of the compressor
    float* entry_gate = nullptr;     // the same
    float* index_kv = nullptr;       // [max_tokens, 2 * index_head_dim]
    float* index_gate = nullptr;     // the same
    float* index_q = nullptr;        // [max_tokens, index heads, index_head_dim]
    float* index_weights = nullptr;  // [max_tokens, index heads]
    float* index_logits = nullptr;   // [index_rows_, max_csa_entries_]
    float* attention = nullptr;      // [max_tokens, H, head_dim]
    float* o_a = nullptr;            // [max_tokens, groups, o_lora_rank]
    int32_t* csa_slots = nullptr;    // [max_tokens, csa_width_]
    int32_t* csa_lengths = nullptr;
    int32_t* hca_slots = nullptr;  // [max_tokens, hca_width_]
    int32_t* hca_lengths = nullptr;
    int64_t* window_slots = nullptr;    // of the rows' own entries
    int32_t* window_indices = nullptr;  // [max_tokens, window_width_]
    int32_t* window_lengths = nullptr;
    int32_t* buffer_begin = nullptr;  // the arrays of WindowPlan
    int64_t* carry_in_ring = nullptr;
    int64_t* carry_in_buffer = nullptr;
    int64_t* carry_out_buffer = nullptr;
    int64_t* carry_out_ring = nullptr;
    std::byte* window_buffer = nullptr;
    std::byte* workspace = nullptr;
  };

  bool Is(int32_t layer, LayerType type) const { return config_.layer_types[layer] == type; }
  const kernels::RopeTable& RopeOf(int32_t layer) const {
    return Is(layer, LayerType::kSlidingAttention) ? rope_.table : compress_rope_.table;
  }
  kernels::KvPages Buffer() const {
    return layout_.WindowBuffer(scratch_.window_buffer, window_plan_.max_buffer_entries());
  }

  absl::Status Project(const StepView& step, const V4AttentionWeights& weights, int32_t layer,
                       float* input);
  absl::Status Compress(const StepView& step, const V4AttentionWeights& weights, int32_t layer);
  absl::Status StoreWindow(const StepView& step, const V4AttentionWeights& weights, int32_t layer);
  absl::Status SelectEntries(const StepView& step, int32_t layer);
  // Rows [begin, begin + count), whose windows lie in `window`.
  kernels::SparseDecodeParams RowParams(const StepView& step, const V4AttentionWeights& weights,
                                        int32_t layer, int32_t begin, int32_t count,
                                        const kernels::KvPages& window) const;
  absl::Status CopyWindows(const StepView& step, int64_t count, const int64_t* from_slots,
                           const kernels::KvPages& from, const int64_t* to_slots,
                           const kernels::KvPages& to);
  absl::Status ProjectOutput(const StepView& step, const V4AttentionWeights& weights,
                             float* output);

  const ModelConfig& config_;
  const StepLimits limits_;
  const int32_t max_model_len_;
  kernels::Backend& backend_;
  const DeepseekV4Layout layout_;
  const CacheLayout cache_layout_;
  const int32_t max_csa_entries_;  // of a sequence
  const int32_t csa_width_;
  const int32_t hca_width_;
  const int32_t window_width_;
  const int32_t index_rows_;  // scored at a time
  WindowPlan window_plan_;
  DeviceRope rope_;           // of layers without compression
  DeviceRope compress_rope_;  // of the others, everything in them
  Scratch scratch_;
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V4_ATTENTION_H_

// DeepseekV32: the network of deepseek_v32: multi-head latent attention over the keys that a
// lightning indexer picks, at most index_topk for each row.
//
// Up to position index_topk a row attends every key, so it is V3's mathematics: ragged rows there
// go through RaggedMha.  Ragged rows further on and all absorbed rows are scored against the cached
// index keys (IndexerLogits, TopKSlots) and attend the latents chosen in absorbed form
// (SparsePrefill, SparseDecode).  Which way a row takes depends on its position and the sequence's
// form alone, so chunk boundaries do not show.  Index keys are stored for every token.
//
// Sources: DeepSeek-V3.2 paper 2.1, models.md 6.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_DEEPSEEK_V32_H_
#define MODEL_DEEPSEEK_V32_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/mla_network.h"

namespace model {

class DeepseekV32 final : public MlaNetwork {
 public:
  // `backend` must outlive the network.
  static absl::StatusOr<std::unique_ptr<DeepseekV32>> Create(ModelConfig config, Weights weights,
                                                             std::string weights_digest,
                                                             const NetworkOptions& options,
                                                             kernels::Backend& backend);

 private:
  static constexpr int32_t kIndexKeyGroup = 1;  // of the cache

  // Rows of a step that attend chosen keys.
  struct RowRange {
    int32_t begin = 0;
    int32_t count = 0;      // <= max_sparse_rows_
    bool absorbed = false;  // decodes and short chunks; else rows of a prompt
  };
  // Device arrays.
  struct IndexScratch {
    float* key = nullptr;        // [max_tokens, index_head_dim]
    float* weights = nullptr;    // [max_tokens, index_n_heads]
    float* q = nullptr;          // [max_sparse_rows, index_n_heads, index_head_dim]
    float* logits = nullptr;     // [max_sparse_rows, max_model_len]
    int32_t* slots = nullptr;    // [max_sparse_rows, slots_width]
    int32_t* lengths = nullptr;  // [max_sparse_rows]
    std::byte* decode_workspace = nullptr;
  };

  DeepseekV32(ModelConfig config, Weights weights, std::string weights_digest,
              const NetworkOptions& options, kernels::Backend& backend, int32_t top_k);

  int64_t max_latent_rows() const override { return max_sparse_rows_; }
  void CarveMore(ScratchCarver& carver) override;
  void PrepareStep(const StepPlan& plan) override;
  absl::Status Attention(const StepView& step, int32_t layer) override;

  // Adds rows [begin, end) in pieces.
  void AddSparseRows(int32_t begin, int32_t end, bool absorbed);
  kernels::IndexKeyParams IndexKeys(const StepView& step, const IndexerWeights& weights,
                                    int32_t layer) const;
  // Slots of the keys that each row of `rows` attends -> index_.slots, index_.lengths.
  absl::Status SelectKeys(const StepView& step, const IndexerWeights& weights, int32_t layer,
                          const RowRange& rows);
  absl::Status AttendSelected(const StepView& step, const AttentionWeights& weights, int32_t layer,
                              const RowRange& rows);

  kernels::RopeTable index_rope() const {
    kernels::RopeTable table = rope();
    table.layout = kernels::RopeLayout::kHalfSplit;  // whatever the main attention has
    return table;
  }

  const int32_t top_k_;  // keys that a row attends at most
  const int32_t max_sparse_rows_;
  const int32_t slots_width_;
  std::vector<RowRange> sparse_rows_;  // of the step in progress
  IndexScratch index_;
};

}  // namespace model

#endif  // MODEL_DEEPSEEK_V32_H_

#include "model/weights.h"

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "model/safetensors_header.h"
#include "model/weight_reader.h"
#include "status/status_macros.h"
#include "xxhash.h"

namespace model {
namespace {

using kernels::ExpertTensors;
using kernels::WeightTensor;

// Reads and packs, layer by layer.
class WeightLoader {
 public:
  WeightLoader(const ModelConfig& config, WeightReader& reader, kernels::Backend& backend)
      : config_(config), reader_(reader), backend_(backend) {}

  absl::Status LoadLayer(int32_t layer, LayerWeights& weights) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    ASSIGN_OR_RETURN(weights.attention.input_norm,
                     Norm(prefix + "input_layernorm.weight", config_.hidden_size));
    RETURN_IF_ERROR(LoadAttention(prefix + "self_attn.", weights.attention));
    ASSIGN_OR_RETURN(weights.mlp.norm,
                     Norm(prefix + "post_attention_layernorm.weight", config_.hidden_size));
    return config_.IsMoeLayer(layer) ? LoadExperts(prefix + "mlp.", weights.mlp)
                                     : LoadDense(prefix + "mlp.", weights.mlp);
  }

  absl::Status LoadEnds(Weights& weights) {
    const std::string embedding_name = "model.embed_tokens.weight";
    ASSIGN_OR_RETURN(weights.embedding, reader_.UnscaledMatrix(embedding_name, config_.vocab_size,
                                                               config_.hidden_size));
    const WeightTensor stored = weights.embedding;
    const int64_t bytes = stored.rows * stored.cols * kernels::DTypeBits(stored.dtype) / 8;
    ASSIGN_OR_RETURN(weights.embedding_memory, backend_.Allocate(bytes));
    RETURN_IF_ERROR(backend_.CopyToDevice(
        {}, weights.embedding_memory->data(),
        {static_cast<const std::byte*>(stored.data), static_cast<size_t>(bytes)}));
    weights.embedding.data = weights.embedding_memory->data();

    ASSIGN_OR_RETURN(weights.final_norm, Norm("model.norm.weight", config_.hidden_size));
    WeightTensor head = stored;
    if (!config_.tie_word_embeddings) {
      ASSIGN_OR_RETURN(head,
                       reader_.Matrix("lm_head.weight", config_.vocab_size, config_.hidden_size));
    }
    ASSIGN_OR_RETURN(weights.head, backend_.PackLinear({&head, 1}));
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<DeviceVector> Norm(const std::string& name, int64_t size) {
    ASSIGN_OR_RETURN(const std::vector<float> values, reader_.Vector(name, size));
    return Upload(values, backend_);
  }

  absl::StatusOr<std::unique_ptr<kernels::PackedLinear>> Linear(const std::string& name,
                                                                int64_t rows, int64_t cols) {
    ASSIGN_OR_RETURN(const WeightTensor tensor, reader_.Matrix(name, rows, cols));
    return backend_.PackLinear({&tensor, 1});
  }

  absl::Status LoadAttention(const std::string& prefix, AttentionWeights& weights) {
    const int64_t hidden = config_.hidden_size;
    const int64_t heads = config_.num_attention_heads;
    const int64_t q_rows = heads * config_.qk_head_dim();
    const int64_t q_rank = config_.q_lora_rank;
    const int64_t kv_rank = config_.kv_lora_rank;
    const int64_t nope = config_.qk_nope_head_dim;
    const int64_t v = config_.v_head_dim;

    std::array<WeightTensor, 2> q_kv_a;
    if (q_rank == 0) {
      ASSIGN_OR_RETURN(q_kv_a[0], reader_.Matrix(prefix + "q_proj.weight", q_rows, hidden));
    } else {
      ASSIGN_OR_RETURN(q_kv_a[0], reader_.Matrix(prefix + "q_a_proj.weight", q_rank, hidden));
      ASSIGN_OR_RETURN(weights.q_a_norm, Norm(prefix + "q_a_layernorm.weight", q_rank));
      ASSIGN_OR_RETURN(weights.q_b, Linear(prefix + "q_b_proj.weight", q_rows, q_rank));
    }
    ASSIGN_OR_RETURN(q_kv_a[1], reader_.Matrix(prefix + "kv_a_proj_with_mqa.weight",
                                               kv_rank + config_.qk_rope_head_dim, hidden));
    ASSIGN_OR_RETURN(weights.q_kv_a, backend_.PackLinear(q_kv_a));
    ASSIGN_OR_RETURN(weights.kv_a_norm, Norm(prefix + "kv_a_layernorm.weight", kv_rank));

    // One tensor, three uses: decompression of all heads at once, and W_UK and W_UV head by head.
    ASSIGN_OR_RETURN(const WeightTensor kv_b,
                     reader_.Matrix(prefix + "kv_b_proj.weight", heads * (nope + v), kv_rank));
    ASSIGN_OR_RETURN(weights.kv_b, backend_.PackLinear({&kv_b, 1}));
    const kernels::HeadSlice key_rows{.num_heads = config_.num_attention_heads,
                                      .head_rows = nope + v,
                                      .row_begin = 0,
                                      .row_count = nope,
                                      .transpose = true};
    ASSIGN_OR_RETURN(weights.w_uk_t, backend_.PackHeadLinear(kv_b, key_rows));
    const kernels::HeadSlice value_rows{.num_heads = config_.num_attention_heads,
                                        .head_rows = nope + v,
                                        .row_begin = nope,
                                        .row_count = v};
    ASSIGN_OR_RETURN(weights.w_uv, backend_.PackHeadLinear(kv_b, value_rows));
    ASSIGN_OR_RETURN(weights.o, Linear(prefix + "o_proj.weight", hidden, heads * v));
    return absl::OkStatus();
  }

  absl::Status LoadDense(const std::string& prefix, MlpWeights& weights) {
    ASSIGN_OR_RETURN(const ExpertTensors mlp, reader_.Mlp(prefix, config_.intermediate_size));
    const std::array<WeightTensor, 2> gate_up = {mlp.gate, mlp.up};
    ASSIGN_OR_RETURN(weights.gate_up, backend_.PackLinear(gate_up));
    ASSIGN_OR_RETURN(weights.down, backend_.PackLinear({&mlp.down, 1}));
    return absl::OkStatus();
  }

  absl::Status LoadExperts(const std::string& prefix, MlpWeights& weights) {
    const int64_t num_experts = config_.gate.num_experts;
    ASSIGN_OR_RETURN(weights.gate,
                     Linear(prefix + "gate.weight", num_experts, config_.hidden_size));
    if (config_.gate.method == kernels::GateMethod::kNoAuxTc) {
      ASSIGN_OR_RETURN(weights.gate_bias,
                       Norm(prefix + "gate.e_score_correction_bias", num_experts));
    }
    ASSIGN_OR_RETURN(const std::vector<ExpertTensors> routed,
                     reader_.RoutedExperts(prefix + "experts."));
    std::vector<ExpertTensors> shared;
    if (config_.n_shared_experts > 0) {
      const int64_t width = int64_t{config_.n_shared_experts} * config_.moe_intermediate_size;
      ASSIGN_OR_RETURN(const ExpertTensors mlp, reader_.Mlp(prefix + "shared_experts.", width));
      shared.push_back(mlp);
    }
    ASSIGN_OR_RETURN(weights.experts, backend_.PackExperts(routed, shared));
    return absl::OkStatus();
  }

  const ModelConfig& config_;
  WeightReader& reader_;
  kernels::Backend& backend_;
};

}  // namespace

absl::StatusOr<DeviceVector> Upload(const std::vector<float>& values, kernels::Backend& backend) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  ASSIGN_OR_RETURN(DeviceVector buffer, backend.Allocate(bytes));
  RETURN_IF_ERROR(backend.CopyToDevice(
      {}, buffer->data(),
      {reinterpret_cast<const std::byte*>(values.data()), static_cast<size_t>(bytes)}));
  return buffer;
}

absl::StatusOr<Weights> LoadWeights(std::unique_ptr<Checkpoint> checkpoint,
                                    const ModelConfig& config, kernels::Backend& backend) {
  Weights weights;
  WeightReader reader(*checkpoint, config);
  WeightLoader loader(config, reader, backend);
  RETURN_IF_ERROR(loader.LoadEnds(weights));
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    weights.layers.emplace_back();
    RETURN_IF_ERROR(loader.LoadLayer(layer, weights.layers.back()));
  }
  weights.bytes = reader.used_bytes();
  weights.skipped_tensors = reader.num_unused();
  weights.checkpoint = std::move(checkpoint);
  return weights;
}

std::string WeightsDigest(std::string_view config_json, const Checkpoint& checkpoint) {
  std::string record = absl::StrCat(config_json.size(), ":", std::string(config_json), "\n");
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    absl::StrAppend(&record, name.size(), ":", name, " ", tensor.dtype_name, " ",
                    ShapeString(tensor.shape), "\n");
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(record.data(), record.size()));
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)));
}

}  // namespace model

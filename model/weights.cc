#include "model/weights.h"

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "model/deepseek_v4_weights.h"
#include "model/safetensors_header.h"
#include "model/weight_reader.h"
#include "status/status_macros.h"
#include "xxhash.h"

namespace model {
namespace {

using kernels::ExpertTensors;
using kernels::WeightTensor;

// The tensors of a layer as the checkpoint stores them.
struct LayerTensors {
  std::vector<float> input_norm;
  std::vector<WeightTensor> q_kv_a;  // stacked
  std::vector<float> q_a_norm;       // empty without q LoRA
  WeightTensor q_b;
  std::vector<float> kv_a_norm;
  WeightTensor kv_b;
  WeightTensor o;
  WeightTensor index_q_b;  // the indexer's: of V3.2 only
  std::vector<float> index_k_norm;
  std::vector<float> index_k_norm_bias;
  std::vector<float> mlp_norm;
  ExpertTensors dense;           // of a dense layer
  WeightTensor gate;             // the others: of an MoE layer
  std::vector<float> gate_bias;  // empty if the family has none
  std::vector<ExpertTensors> routed;
  std::vector<ExpertTensors> shared;  // one of all shared experts' width, or none
};

absl::StatusOr<EndTensors> ReadEnds(const ModelConfig& config, WeightReader& reader) {
  EndTensors ends;
  ASSIGN_OR_RETURN(ends.embedding, reader.UnscaledMatrix("model.embed_tokens.weight",
                                                         config.vocab_size, config.hidden_size));
  ASSIGN_OR_RETURN(ends.final_norm, reader.Vector("model.norm.weight", config.hidden_size));
  ends.head = ends.embedding;
  if (!config.tie_word_embeddings) {
    ASSIGN_OR_RETURN(ends.head,
                     reader.Matrix("lm_head.weight", config.vocab_size, config.hidden_size));
  }
  return ends;
}

absl::Status ReadAttention(const ModelConfig& config, const std::string& prefix,
                           WeightReader& reader, LayerTensors& layer) {
  const int64_t hidden = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  const int64_t q_rows = heads * config.qk_head_dim();
  const int64_t q_rank = config.q_lora_rank;
  const int64_t kv_rank = config.kv_lora_rank;
  const int64_t kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim);
  if (q_rank == 0) {
    ASSIGN_OR_RETURN(layer.q_kv_a.emplace_back(),
                     reader.Matrix(prefix + "q_proj.weight", q_rows, hidden));
  } else {
    ASSIGN_OR_RETURN(layer.q_kv_a.emplace_back(),
                     reader.Matrix(prefix + "q_a_proj.weight", q_rank, hidden));
    ASSIGN_OR_RETURN(layer.q_a_norm, reader.Vector(prefix + "q_a_layernorm.weight", q_rank));
    ASSIGN_OR_RETURN(layer.q_b, reader.Matrix(prefix + "q_b_proj.weight", q_rows, q_rank));
  }
  ASSIGN_OR_RETURN(layer.q_kv_a.emplace_back(),
                   reader.Matrix(prefix + "kv_a_proj_with_mqa.weight",
                                 kv_rank + config.qk_rope_head_dim, hidden));
  ASSIGN_OR_RETURN(layer.kv_a_norm, reader.Vector(prefix + "kv_a_layernorm.weight", kv_rank));
  ASSIGN_OR_RETURN(layer.kv_b, reader.Matrix(prefix + "kv_b_proj.weight", kv_b_rows, kv_rank));
  ASSIGN_OR_RETURN(layer.o,
                   reader.Matrix(prefix + "o_proj.weight", hidden, heads * config.v_head_dim));
  return absl::OkStatus();
}

absl::Status ReadIndexer(const ModelConfig& config, const std::string& prefix, WeightReader& reader,
                         LayerTensors& layer) {
  const int64_t heads = config.index_n_heads;
  const int64_t dim = config.index_head_dim;
  ASSIGN_OR_RETURN(layer.index_q_b,
                   reader.Matrix(prefix + "wq_b.weight", heads * dim, config.q_lora_rank));
  ASSIGN_OR_RETURN(layer.q_kv_a.emplace_back(),
                   reader.Matrix(prefix + "wk.weight", dim, config.hidden_size));
  ASSIGN_OR_RETURN(layer.q_kv_a.emplace_back(),
                   reader.Matrix(prefix + "weights_proj.weight", heads, config.hidden_size));
  ASSIGN_OR_RETURN(layer.index_k_norm, reader.Vector(prefix + "k_norm.weight", dim));
  ASSIGN_OR_RETURN(layer.index_k_norm_bias, reader.Vector(prefix + "k_norm.bias", dim));
  return absl::OkStatus();
}

absl::Status ReadExperts(const ModelConfig& config, const std::string& prefix, WeightReader& reader,
                         LayerTensors& layer) {
  const int64_t num_experts = config.gate.num_experts;
  ASSIGN_OR_RETURN(layer.gate,
                   reader.Matrix(prefix + "gate.weight", num_experts, config.hidden_size));
  if (config.gate.method == kernels::GateMethod::kNoAuxTc) {
    ASSIGN_OR_RETURN(layer.gate_bias,
                     reader.Vector(prefix + "gate.e_score_correction_bias", num_experts));
  }
  ASSIGN_OR_RETURN(layer.routed, reader.RoutedExperts(prefix + "experts."));
  if (config.n_shared_experts > 0) {
    const int64_t width = int64_t{config.n_shared_experts} * config.moe_intermediate_size;
    ASSIGN_OR_RETURN(const ExpertTensors shared, reader.Mlp(prefix + "shared_experts.", width));
    layer.shared.push_back(shared);
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerTensors> ReadLayer(const ModelConfig& config, int32_t index,
                                       WeightReader& reader) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  LayerTensors layer;
  ASSIGN_OR_RETURN(layer.input_norm,
                   reader.Vector(prefix + "input_layernorm.weight", config.hidden_size));
  RETURN_IF_ERROR(ReadAttention(config, prefix + "self_attn.", reader, layer));
  if (config.family == ModelFamily::kDeepseekV32) {
    RETURN_IF_ERROR(ReadIndexer(config, prefix + "self_attn.indexer.", reader, layer));
  }
  ASSIGN_OR_RETURN(layer.mlp_norm,
                   reader.Vector(prefix + "post_attention_layernorm.weight", config.hidden_size));
  if (config.IsMoeLayer(index)) {
    RETURN_IF_ERROR(ReadExperts(config, prefix + "mlp.", reader, layer));
  } else {
    ASSIGN_OR_RETURN(layer.dense, reader.Mlp(prefix + "mlp.", config.intermediate_size));
  }
  return layer;
}

absl::Status PackAttention(const ModelConfig& config, const LayerTensors& tensors,
                           kernels::Backend& backend, AttentionWeights& weights) {
  ASSIGN_OR_RETURN(weights.input_norm, Upload(tensors.input_norm, backend));
  ASSIGN_OR_RETURN(weights.q_kv_a, backend.PackLinear(tensors.q_kv_a));
  if (config.q_lora_rank > 0) {
    ASSIGN_OR_RETURN(weights.q_a_norm, Upload(tensors.q_a_norm, backend));
    ASSIGN_OR_RETURN(weights.q_b, backend.PackLinear({&tensors.q_b, 1}));
  }
  ASSIGN_OR_RETURN(weights.kv_a_norm, Upload(tensors.kv_a_norm, backend));
  // One tensor, three uses: decompression of all heads at once, and W_UK and W_UV head by head.
  ASSIGN_OR_RETURN(weights.kv_b, backend.PackLinear({&tensors.kv_b, 1}));
  const int64_t head_rows = config.qk_nope_head_dim + config.v_head_dim;
  const kernels::HeadSlice key_rows{.num_heads = config.num_attention_heads,
                                    .head_rows = head_rows,
                                    .row_begin = 0,
                                    .row_count = config.qk_nope_head_dim,
                                    .transpose = true};
  ASSIGN_OR_RETURN(weights.w_uk_t, backend.PackHeadLinear(tensors.kv_b, key_rows));
  const kernels::HeadSlice value_rows{.num_heads = config.num_attention_heads,
                                      .head_rows = head_rows,
                                      .row_begin = config.qk_nope_head_dim,
                                      .row_count = config.v_head_dim};
  ASSIGN_OR_RETURN(weights.w_uv, backend.PackHeadLinear(tensors.kv_b, value_rows));
  ASSIGN_OR_RETURN(weights.o, backend.PackLinear({&tensors.o, 1}));
  if (config.family != ModelFamily::kDeepseekV32) return absl::OkStatus();
  ASSIGN_OR_RETURN(weights.indexer.q_b, backend.PackLinear({&tensors.index_q_b, 1}));
  ASSIGN_OR_RETURN(weights.indexer.k_norm, Upload(tensors.index_k_norm, backend));
  ASSIGN_OR_RETURN(weights.indexer.k_norm_bias, Upload(tensors.index_k_norm_bias, backend));
  return absl::OkStatus();
}

absl::Status PackMlp(const LayerTensors& tensors, kernels::Backend& backend, MlpWeights& weights) {
  ASSIGN_OR_RETURN(weights.norm, Upload(tensors.mlp_norm, backend));
  if (tensors.routed.empty()) {
    const std::array<WeightTensor, 2> gate_up = {tensors.dense.gate, tensors.dense.up};
    ASSIGN_OR_RETURN(weights.gate_up, backend.PackLinear(gate_up));
    ASSIGN_OR_RETURN(weights.down, backend.PackLinear({&tensors.dense.down, 1}));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(weights.gate, backend.PackLinear({&tensors.gate, 1}));
  if (!tensors.gate_bias.empty()) {
    ASSIGN_OR_RETURN(weights.gate_bias, Upload(tensors.gate_bias, backend));
  }
  ASSIGN_OR_RETURN(weights.experts, backend.PackExperts(tensors.routed, tensors.shared));
  return absl::OkStatus();
}

absl::StatusOr<DeviceVector> UploadBytes(const void* data, size_t bytes,
                                         kernels::Backend& backend) {
  ASSIGN_OR_RETURN(DeviceVector buffer, backend.Allocate(static_cast<int64_t>(bytes)));
  RETURN_IF_ERROR(
      backend.CopyToDevice({}, buffer->data(), {static_cast<const std::byte*>(data), bytes}));
  return buffer;
}

absl::Status CheckMla(const ModelConfig& config, WeightReader& reader) {
  RETURN_IF_ERROR(ReadEnds(config, reader).status());
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    RETURN_IF_ERROR(ReadLayer(config, i, reader).status());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DeviceVector> Upload(const std::vector<float>& values, kernels::Backend& backend) {
  return UploadBytes(values.data(), values.size() * sizeof(float), backend);
}

absl::StatusOr<DeviceVector> Upload(const std::vector<int32_t>& values, kernels::Backend& backend) {
  return UploadBytes(values.data(), values.size() * sizeof(int32_t), backend);
}

absl::StatusOr<EndWeights> PackEnds(const EndTensors& ends, kernels::Backend& backend) {
  EndWeights weights;
  const WeightTensor& stored = ends.embedding;
  const int64_t bytes = stored.rows * stored.cols * kernels::DTypeBits(stored.dtype) / 8;
  ASSIGN_OR_RETURN(weights.embedding_memory,
                   UploadBytes(stored.data, static_cast<size_t>(bytes), backend));
  weights.embedding = stored;
  weights.embedding.data = weights.embedding_memory->data();
  ASSIGN_OR_RETURN(weights.final_norm, Upload(ends.final_norm, backend));
  ASSIGN_OR_RETURN(weights.head, backend.PackLinear({&ends.head, 1}));
  return weights;
}

absl::StatusOr<Weights> LoadWeights(std::unique_ptr<Checkpoint> checkpoint,
                                    const ModelConfig& config, kernels::Backend& backend) {
  Weights weights;
  WeightReader reader(*checkpoint, config);
  ASSIGN_OR_RETURN(const EndTensors ends, ReadEnds(config, reader));
  ASSIGN_OR_RETURN(weights.ends, PackEnds(ends, backend));
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    ASSIGN_OR_RETURN(const LayerTensors tensors, ReadLayer(config, i, reader));
    LayerWeights& layer = weights.layers.emplace_back();
    RETURN_IF_ERROR(PackAttention(config, tensors, backend, layer.attention));
    RETURN_IF_ERROR(PackMlp(tensors, backend, layer.mlp));
    checkpoint->ReleasePages();  // or a large checkpoint would be resident twice
  }
  weights.bytes = reader.used_bytes();
  weights.skipped_tensors = reader.num_unused();
  weights.checkpoint = std::move(checkpoint);
  return weights;
}

absl::StatusOr<CheckpointSummary> CheckCheckpoint(const Checkpoint& checkpoint,
                                                  const ModelConfig& config) {
  WeightReader reader(checkpoint, config);
  RETURN_IF_ERROR(config.family == ModelFamily::kDeepseekV4 ? CheckDeepseekV4Tensors(config, reader)
                                                            : CheckMla(config, reader));
  return CheckpointSummary{
      .parameters = reader.used_parameters(),
      .used_bytes = reader.used_bytes(),
      .used_tensors = static_cast<int64_t>(checkpoint.tensors().size()) - reader.num_unused(),
      .draft_tensors = reader.num_draft(),
      .skipped_tensors = reader.num_unused()};
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

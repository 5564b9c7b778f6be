#include "model/deepseek_v4_weights.h"

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace model {
namespace {

using kernels::ExpertTensors;
using kernels::WeightTensor;

// A site of the residual streams as the checkpoint stores it.
struct StreamMixTensors {
  WeightTensor fn;
  std::vector<float> base;
  std::vector<float> scale;
};

struct CompressorTensors {
  WeightTensor kv;
  WeightTensor gate;
  std::vector<float> position_bias;
  std::vector<float> norm;
};

struct LayerTensors {
  StreamMixTensors attention_mix;
  std::vector<float> attention_norm;
  WeightTensor q_a;
  std::vector<float> q_a_norm;
  WeightTensor q_b;
  WeightTensor kv;
  std::vector<float> kv_norm;
  std::vector<float> sink;
  WeightTensor o_a;
  WeightTensor o_b;
  CompressorTensors compressor;        // of a layer that compresses
  CompressorTensors index_compressor;  // CSA: these three
  WeightTensor index_q_b;
  WeightTensor index_head_weights;
  StreamMixTensors expert_mix;
  std::vector<float> experts_norm;
  WeightTensor gate;
  std::vector<float> gate_bias;       // empty in hash layers
  std::vector<int32_t> expert_table;  // empty in the others
  std::vector<ExpertTensors> routed;
  ExpertTensors shared;
};

// Finds tensors of one module under any of their names.
class Names {
 public:
  // `prefixes`: of the module, the released one first.
  Names(const WeightReader& reader, std::vector<std::string> prefixes)
      : reader_(reader), prefixes_(std::move(prefixes)) {}

  bool Has(std::initializer_list<const char*> names) const { return reader_.Has(Find(names)); }

  // The first of the names that exists, else the released one (whose absence is then an error).
  std::string Find(std::initializer_list<const char*> names) const {
    for (const std::string& prefix : prefixes_) {
      for (const char* name : names) {
        if (std::string full = prefix + name; reader_.Has(full)) return full;
      }
    }
    return prefixes_.front() + *names.begin();
  }

  // Names of a part of the module.
  Names Inner(std::initializer_list<const char*> parts) const {
    std::vector<std::string> inner;
    for (const std::string& prefix : prefixes_) {
      for (const char* part : parts) inner.push_back(prefix + part);
    }
    return Names(reader_, std::move(inner));
  }

 private:
  const WeightReader& reader_;
  const std::vector<std::string> prefixes_;
};

absl::StatusOr<StreamMixTensors> ReadStreamMix(const ModelConfig& config, int64_t mixes,
                                               int64_t num_scales, const Names& names,
                                               WeightReader& reader) {
  StreamMixTensors mix;
  ASSIGN_OR_RETURN(mix.fn, reader.Matrix(names.Find({"fn"}), mixes,
                                         int64_t{config.hc_mult} * config.hidden_size));
  ASSIGN_OR_RETURN(mix.base, reader.Vector(names.Find({"base"}), mixes));
  ASSIGN_OR_RETURN(mix.scale, reader.Vector(names.Find({"scale"}), num_scales));
  return mix;
}

absl::StatusOr<CompressorTensors> ReadCompressor(const ModelConfig& config, int32_t ratio,
                                                 int64_t channels, int64_t dim, const Names& names,
                                                 WeightReader& reader) {
  CompressorTensors compressor;
  ASSIGN_OR_RETURN(compressor.kv, reader.Matrix(names.Find({"wkv.weight", "kv_proj.weight"}),
                                                channels, config.hidden_size));
  ASSIGN_OR_RETURN(compressor.gate, reader.Matrix(names.Find({"wgate.weight", "gate_proj.weight"}),
                                                  channels, config.hidden_size));
  ASSIGN_OR_RETURN(compressor.position_bias, reader.Vector(names.Find({"ape", "position_bias"}),
                                                           std::vector<int64_t>{ratio, channels}));
  ASSIGN_OR_RETURN(compressor.norm,
                   reader.Vector(names.Find({"norm.weight", "kv_norm.weight"}), dim));
  return compressor;
}

absl::Status ReadCompressors(const ModelConfig& config, LayerType type, const Names& names,
                             WeightReader& reader, LayerTensors& layer) {
  const int64_t dim = config.qk_head_dim();
  if (type == LayerType::kSlidingAttention) return absl::OkStatus();
  const Names compressor = names.Inner({"compressor."});
  if (type == LayerType::kHeavilyCompressedAttention) {
    ASSIGN_OR_RETURN(layer.compressor,
                     ReadCompressor(config, config.hca_ratio, dim, dim, compressor, reader));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(layer.compressor,
                   ReadCompressor(config, config.csa_ratio, 2 * dim, dim, compressor, reader));
  const Names indexer = names.Inner({"indexer.", "compressor.indexer."});
  const int64_t index_dim = config.index_head_dim;
  // In transformers the compressor of the index keys is the indexer itself.
  ASSIGN_OR_RETURN(layer.index_compressor,
                   ReadCompressor(config, config.csa_ratio, 2 * index_dim, index_dim,
                                  indexer.Inner({"compressor.", ""}), reader));
  ASSIGN_OR_RETURN(layer.index_q_b,
                   reader.Matrix(indexer.Find({"wq_b.weight", "q_b_proj.weight"}),
                                 config.index_n_heads * index_dim, config.q_lora_rank));
  ASSIGN_OR_RETURN(
      layer.index_head_weights,
      reader.Matrix(indexer.Find({"weights_proj.weight", "scorer.weights_proj.weight"}),
                    config.index_n_heads, config.hidden_size));
  return absl::OkStatus();
}

absl::Status ReadAttention(const ModelConfig& config, LayerType type, const Names& names,
                           WeightReader& reader, LayerTensors& layer) {
  const int64_t hidden = config.hidden_size;
  const int64_t dim = config.qk_head_dim();
  const int64_t heads = config.num_attention_heads;
  const int64_t rank = config.q_lora_rank;
  const int64_t o_rows = int64_t{config.o_groups} * config.o_lora_rank;
  ASSIGN_OR_RETURN(layer.q_a,
                   reader.Matrix(names.Find({"wq_a.weight", "q_a_proj.weight"}), rank, hidden));
  ASSIGN_OR_RETURN(layer.q_a_norm,
                   reader.Vector(names.Find({"q_norm.weight", "q_a_norm.weight"}), rank));
  ASSIGN_OR_RETURN(
      layer.q_b, reader.Matrix(names.Find({"wq_b.weight", "q_b_proj.weight"}), heads * dim, rank));
  ASSIGN_OR_RETURN(layer.kv,
                   reader.Matrix(names.Find({"wkv.weight", "kv_proj.weight"}), dim, hidden));
  // transformers 5.17 saves it as "norm".
  ASSIGN_OR_RETURN(layer.kv_norm,
                   reader.Vector(names.Find({"kv_norm.weight", "norm.weight"}), dim));
  ASSIGN_OR_RETURN(layer.sink, reader.Vector(names.Find({"attn_sink", "sinks"}), heads));
  ASSIGN_OR_RETURN(layer.o_a, reader.Matrix(names.Find({"wo_a.weight", "o_a_proj.weight"}), o_rows,
                                            heads / config.o_groups * dim));
  if (layer.o_a.scales != nullptr && config.o_lora_rank % layer.o_a.scale_block_rows != 0 &&
      layer.o_a.scale_block_rows % config.o_lora_rank != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("o_lora_rank must divide the ", layer.o_a.scale_block_rows,
                     " rows of a scale block or be a multiple of them, is ", config.o_lora_rank));
  }
  ASSIGN_OR_RETURN(layer.o_b,
                   reader.Matrix(names.Find({"wo_b.weight", "o_b_proj.weight"}), hidden, o_rows));
  return ReadCompressors(config, type, names, reader, layer);
}

absl::StatusOr<ExpertTensors> ReadExpert(const ModelConfig& config, const Names& names,
                                         bool fp4_allowed, WeightReader& reader) {
  const int64_t hidden = config.hidden_size;
  const int64_t width = config.moe_intermediate_size;
  ExpertTensors expert;
  ASSIGN_OR_RETURN(expert.gate, reader.Matrix(names.Find({"w1.weight", "gate_proj.weight"}), width,
                                              hidden, fp4_allowed));
  ASSIGN_OR_RETURN(expert.up, reader.Matrix(names.Find({"w3.weight", "up_proj.weight"}), width,
                                            hidden, fp4_allowed));
  ASSIGN_OR_RETURN(expert.down, reader.Matrix(names.Find({"w2.weight", "down_proj.weight"}), hidden,
                                              width, fp4_allowed));
  return expert;
}

absl::Status ReadExperts(const ModelConfig& config, bool hash, const Names& names,
                         WeightReader& reader, LayerTensors& layer) {
  const int32_t num_experts = config.gate.num_experts;
  ASSIGN_OR_RETURN(layer.gate,
                   reader.Matrix(names.Find({"gate.weight"}), num_experts, config.hidden_size));
  if (hash) {
    ASSIGN_OR_RETURN(layer.expert_table,
                     reader.IndexTable(names.Find({"gate.tid2eid"}), config.vocab_size,
                                       config.gate.top_k, num_experts));
  } else {
    ASSIGN_OR_RETURN(
        layer.gate_bias,
        reader.Vector(names.Find({"gate.bias", "gate.e_score_correction_bias"}), num_experts));
  }
  const std::string fused = names.Find({"experts.gate_up_proj"});
  if (reader.Has(fused)) {
    ASSIGN_OR_RETURN(layer.routed, reader.FusedExperts(
                                       fused.substr(0, fused.size() - sizeof("gate_up_proj") + 1)));
  } else {
    for (int32_t i = 0; i < num_experts; ++i) {
      const std::string part = absl::StrCat("experts.", i, ".");
      ASSIGN_OR_RETURN(const ExpertTensors expert, ReadExpert(config, names.Inner({part.c_str()}),
                                                              /*fp4_allowed=*/true, reader));
      layer.routed.push_back(expert);
    }
  }
  ASSIGN_OR_RETURN(layer.shared, ReadExpert(config, names.Inner({"shared_experts."}),
                                            /*fp4_allowed=*/true, reader));
  return absl::OkStatus();
}

absl::StatusOr<LayerTensors> ReadLayer(const ModelConfig& config, int32_t index,
                                       WeightReader& reader) {
  const std::string prefix = absl::StrCat("layers.", index, ".");
  const Names names(reader, {prefix, absl::StrCat("model.", prefix)});
  const int64_t mixes = int64_t{config.hc_mult} * (2 + config.hc_mult);
  LayerTensors layer;
  ASSIGN_OR_RETURN(layer.attention_mix,
                   ReadStreamMix(config, mixes, 3, names.Inner({"hc_attn_", "attn_hc."}), reader));
  ASSIGN_OR_RETURN(layer.attention_norm,
                   reader.Vector(names.Find({"attn_norm.weight", "input_layernorm.weight"}),
                                 config.hidden_size));
  RETURN_IF_ERROR(ReadAttention(config, config.layer_types[index],
                                names.Inner({"attn.", "self_attn."}), reader, layer));
  ASSIGN_OR_RETURN(layer.expert_mix,
                   ReadStreamMix(config, mixes, 3, names.Inner({"hc_ffn_", "ffn_hc."}), reader));
  ASSIGN_OR_RETURN(layer.experts_norm,
                   reader.Vector(names.Find({"ffn_norm.weight", "post_attention_layernorm.weight"}),
                                 config.hidden_size));
  RETURN_IF_ERROR(
      ReadExperts(config, config.hash_moe[index], names.Inner({"ffn.", "mlp."}), reader, layer));
  return layer;
}

struct OuterTensors {
  EndTensors ends;
  StreamMixTensors head_mix;
};

absl::StatusOr<OuterTensors> ReadOuter(const ModelConfig& config, WeightReader& reader) {
  const Names names(reader, {"", "model."});
  OuterTensors outer;
  ASSIGN_OR_RETURN(outer.ends.embedding,
                   reader.UnscaledMatrix(names.Find({"embed.weight", "embed_tokens.weight"}),
                                         config.vocab_size, config.hidden_size));
  ASSIGN_OR_RETURN(outer.ends.final_norm,
                   reader.Vector(names.Find({"norm.weight"}), config.hidden_size));
  outer.ends.head = outer.ends.embedding;
  if (!config.tie_word_embeddings) {
    ASSIGN_OR_RETURN(outer.ends.head, reader.Matrix(names.Find({"head.weight", "lm_head.weight"}),
                                                    config.vocab_size, config.hidden_size));
  }
  ASSIGN_OR_RETURN(outer.head_mix, ReadStreamMix(config, config.hc_mult, 1,
                                                 names.Inner({"hc_head_", "hc_head.hc_"}), reader));
  return outer;
}

absl::StatusOr<StreamMixWeights> PackStreamMix(const StreamMixTensors& tensors,
                                               kernels::Backend& backend) {
  StreamMixWeights mix;
  ASSIGN_OR_RETURN(mix.fn, backend.PackLinear({&tensors.fn, 1}));
  ASSIGN_OR_RETURN(mix.base, Upload(tensors.base, backend));
  ASSIGN_OR_RETURN(mix.scale, Upload(tensors.scale, backend));
  return mix;
}

absl::StatusOr<CompressorWeights> PackCompressor(const CompressorTensors& tensors,
                                                 kernels::Backend& backend) {
  CompressorWeights compressor;
  ASSIGN_OR_RETURN(compressor.position_bias, Upload(tensors.position_bias, backend));
  ASSIGN_OR_RETURN(compressor.norm, Upload(tensors.norm, backend));
  return compressor;
}

absl::Status PackAttention(const ModelConfig& config, LayerType type, const LayerTensors& tensors,
                           kernels::Backend& backend, V4AttentionWeights& weights) {
  ASSIGN_OR_RETURN(weights.norm, Upload(tensors.attention_norm, backend));
  std::vector<WeightTensor> input = {tensors.q_a, tensors.kv};
  std::vector<WeightTensor> q_b = {tensors.q_b};
  if (type != LayerType::kSlidingAttention) {
    input.insert(input.end(), {tensors.compressor.kv, tensors.compressor.gate});
    ASSIGN_OR_RETURN(weights.compressor, PackCompressor(tensors.compressor, backend));
  }
  if (type == LayerType::kCompressedSparseAttention) {
    input.insert(input.end(), {tensors.index_compressor.kv, tensors.index_compressor.gate,
                               tensors.index_head_weights});
    q_b.push_back(tensors.index_q_b);
    ASSIGN_OR_RETURN(weights.index_compressor, PackCompressor(tensors.index_compressor, backend));
  }
  ASSIGN_OR_RETURN(weights.input, backend.PackLinear(input));
  ASSIGN_OR_RETURN(weights.q_a_norm, Upload(tensors.q_a_norm, backend));
  ASSIGN_OR_RETURN(weights.q_b, backend.PackLinear(q_b));
  ASSIGN_OR_RETURN(weights.kv_norm, Upload(tensors.kv_norm, backend));
  ASSIGN_OR_RETURN(weights.sink, Upload(tensors.sink, backend));
  for (int32_t group = 0; group < config.o_groups; ++group) {
    const WeightTensor rows =
        MatrixRows(tensors.o_a, int64_t{group} * config.o_lora_rank, config.o_lora_rank);
    ASSIGN_OR_RETURN(weights.o_a.emplace_back(), backend.PackLinear({&rows, 1}));
  }
  ASSIGN_OR_RETURN(weights.o_b, backend.PackLinear({&tensors.o_b, 1}));
  return absl::OkStatus();
}

absl::Status PackExperts(const LayerTensors& tensors, kernels::Backend& backend,
                         V4ExpertWeights& weights) {
  ASSIGN_OR_RETURN(weights.norm, Upload(tensors.experts_norm, backend));
  ASSIGN_OR_RETURN(weights.gate, backend.PackLinear({&tensors.gate, 1}));
  if (tensors.expert_table.empty()) {
    ASSIGN_OR_RETURN(weights.gate_bias, Upload(tensors.gate_bias, backend));
  } else {
    ASSIGN_OR_RETURN(weights.expert_table, Upload(tensors.expert_table, backend));
  }
  ASSIGN_OR_RETURN(weights.experts, backend.PackExperts(tensors.routed, {&tensors.shared, 1}));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<V4Weights> LoadDeepseekV4Weights(std::unique_ptr<Checkpoint> checkpoint,
                                                const ModelConfig& config,
                                                kernels::Backend& backend) {
  V4Weights weights;
  WeightReader reader(*checkpoint, config);
  ASSIGN_OR_RETURN(const OuterTensors outer, ReadOuter(config, reader));
  ASSIGN_OR_RETURN(weights.ends, PackEnds(outer.ends, backend));
  ASSIGN_OR_RETURN(weights.head_mix, PackStreamMix(outer.head_mix, backend));
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    ASSIGN_OR_RETURN(const LayerTensors tensors, ReadLayer(config, i, reader));
    V4LayerWeights& layer = weights.layers.emplace_back();
    ASSIGN_OR_RETURN(layer.attention_mix, PackStreamMix(tensors.attention_mix, backend));
    RETURN_IF_ERROR(
        PackAttention(config, config.layer_types[i], tensors, backend, layer.attention));
    ASSIGN_OR_RETURN(layer.expert_mix, PackStreamMix(tensors.expert_mix, backend));
    RETURN_IF_ERROR(PackExperts(tensors, backend, layer.experts));
    checkpoint->ReleasePages();  // or a large checkpoint would be resident twice
  }
  weights.bytes = reader.used_bytes();
  weights.skipped_tensors = reader.num_unused();
  weights.checkpoint = std::move(checkpoint);
  return weights;
}

absl::Status CheckDeepseekV4Tensors(const ModelConfig& config, WeightReader& reader) {
  RETURN_IF_ERROR(ReadOuter(config, reader).status());
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    RETURN_IF_ERROR(ReadLayer(config, i, reader).status());
  }
  return absl::OkStatus();
}

}  // namespace model

// The weights of a V4 network, packed for a backend from the tensors of a checkpoint
// (models.md 2.4). Each tensor is found under its released name, the name transformers saves it by,
// or its module name in transformers.  Matrices keep their stored format; vectors become float32.

#ifndef MODEL_DEEPSEEK_V4_WEIGHTS_H_
#define MODEL_DEEPSEEK_V4_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weight_reader.h"
#include "model/weights.h"

namespace model {

// One site of the residual streams, or the head's (kernels/hyper_connection.h).
struct StreamMixWeights {
  std::unique_ptr<kernels::PackedLinear> fn;
  DeviceVector base;
  DeviceVector scale;
};

// kernels/compress_kv.h; its two projections are rows of V4AttentionWeights::input.
struct CompressorWeights {
  DeviceVector position_bias;
  DeviceVector norm;
};

struct V4AttentionWeights {
  DeviceVector norm;  // [hidden]
  // What reads the layer's normalised input, rows in this order: q_a, kv; with a compressor its kv
  // and gate; with an indexer its compressor's kv and gate, and its head weights.
  std::unique_ptr<kernels::PackedLinear> input;
  DeviceVector q_a_norm;                           // [q_lora_rank]
  std::unique_ptr<kernels::PackedLinear> q_b;      // [H * head_dim (+ index heads), q_lora_rank]
  DeviceVector kv_norm;                            // [head_dim]
  DeviceVector sink;                               // [H]
  CompressorWeights compressor;                    // CSA, HCA
  CompressorWeights index_compressor;              // CSA
  // By group [o_lora_rank, H / groups * head_dim].
  std::vector<std::unique_ptr<kernels::PackedLinear>> o_a;
  std::unique_ptr<kernels::PackedLinear> o_b;      // [hidden, groups * o_lora_rank]
};

struct V4ExpertWeights {
  DeviceVector norm;                            // [hidden]
  std::unique_ptr<kernels::PackedLinear> gate;  // [experts, hidden]
  DeviceVector gate_bias;                       // [experts]; null in hash layers
  DeviceVector expert_table;                    // int32 [vocab, top_k]; hash layers only
  std::unique_ptr<kernels::PackedExperts> experts;

  const int32_t* table() const {
    return expert_table == nullptr ? nullptr
                                   : reinterpret_cast<const int32_t*>(expert_table->data());
  }
};

struct V4LayerWeights {
  StreamMixWeights attention_mix;
  V4AttentionWeights attention;
  StreamMixWeights expert_mix;
  V4ExpertWeights experts;
};

struct V4Weights {
  std::unique_ptr<Checkpoint> checkpoint;  // packed objects may point into it
  EndWeights ends;
  std::vector<V4LayerWeights> layers;
  StreamMixWeights head_mix;
  int64_t bytes = 0;  // of the tensors used, as stored
  int64_t skipped_tensors = 0;
};

// Errors: as CheckCheckpoint, and those of the backend.
absl::StatusOr<V4Weights> LoadDeepseekV4Weights(std::unique_ptr<Checkpoint> checkpoint,
                                                const ModelConfig& config,
                                                kernels::Backend& backend);

// Looks at every tensor that the network needs.
absl::Status CheckDeepseekV4Tensors(const ModelConfig& config, WeightReader& reader);

}  // namespace model

#endif  // MODEL_DEEPSEEK_V4_WEIGHTS_H_

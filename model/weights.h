// The weights of a V2, V3 or V3.2 network, packed for a backend from the tensors of a checkpoint
// (models.md 2.1, 2.2), and what every family's weights have in common.  Matrices keep their stored
// format; norms and biases become float32.

#ifndef MODEL_WEIGHTS_H_
#define MODEL_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace model {

// A vector in device memory.
using DeviceVector = std::unique_ptr<kernels::Buffer>;

// The lightning indexer of V3.2 (models.md 6.1).
struct IndexerWeights {
  std::unique_ptr<kernels::PackedLinear> q_b;  // [index_n_heads * index_head_dim, q_lora_rank]
  DeviceVector k_norm;                         // [index_head_dim]
  DeviceVector k_norm_bias;                    // [index_head_dim]
};

struct AttentionWeights {
  DeviceVector input_norm;  // [hidden]
  // [.., hidden]: q (or q_a) rows, then kv_a rows; with an indexer its key's and its head weights'.
  std::unique_ptr<kernels::PackedLinear> q_kv_a;
  DeviceVector q_a_norm;                              // [q_lora_rank]; null without q LoRA
  std::unique_ptr<kernels::PackedLinear> q_b;         // [H * qk, q_lora_rank]; null without q LoRA
  DeviceVector kv_a_norm;                             // [kv_lora_rank]
  std::unique_ptr<kernels::PackedLinear> kv_b;        // [H * (nope + v), kv_lora_rank]
  std::unique_ptr<kernels::PackedHeadLinear> w_uk_t;  // per head nope -> kv_lora_rank
  std::unique_ptr<kernels::PackedHeadLinear> w_uv;    // per head kv_lora_rank -> v
  std::unique_ptr<kernels::PackedLinear> o;           // [hidden, H * v]
  IndexerWeights indexer;                             // empty but for V3.2
};

// Of a layer either the dense part or the experts are there.
struct MlpWeights {
  DeviceVector norm;                               // [hidden]
  std::unique_ptr<kernels::PackedLinear> gate_up;  // [2 * intermediate, hidden]
  std::unique_ptr<kernels::PackedLinear> down;     // [hidden, intermediate]
  std::unique_ptr<kernels::PackedLinear> gate;     // router, [experts, hidden]
  DeviceVector gate_bias;                          // [experts]; V3 only
  std::unique_ptr<kernels::PackedExperts> experts;
};

struct LayerWeights {
  AttentionWeights attention;
  MlpWeights mlp;
};

// What lies around the layers, in every family.
struct EndWeights {
  std::unique_ptr<kernels::Buffer> embedding_memory;
  kernels::WeightTensor embedding;              // [vocab, hidden], data in embedding_memory
  DeviceVector final_norm;                      // [hidden]
  std::unique_ptr<kernels::PackedLinear> head;  // [vocab, hidden]
};

struct Weights {
  std::unique_ptr<Checkpoint> checkpoint;  // packed objects may point into it
  EndWeights ends;
  std::vector<LayerWeights> layers;
  int64_t bytes = 0;  // of the tensors used, as stored
  int64_t skipped_tensors = 0;
};

// The same as tensors of the checkpoint.
struct EndTensors {
  kernels::WeightTensor embedding;
  std::vector<float> final_norm;
  kernels::WeightTensor head;
};
absl::StatusOr<EndWeights> PackEnds(const EndTensors& ends, kernels::Backend& backend);

// What a checkpoint holds, without packing anything.
struct CheckpointSummary {
  int64_t parameters = 0;  // of the tensors used, scales not counted
  int64_t used_bytes = 0;
  int64_t used_tensors = 0;
  int64_t draft_tensors = 0;    // of MTP layers, not used
  int64_t skipped_tensors = 0;  // all that are not used: those and unknown ones
};

// Looks at every tensor the network needs.
// Errors: kNotFound, kInvalidArgument: one sentence naming file, tensor, expected and found.
absl::StatusOr<CheckpointSummary> CheckCheckpoint(const Checkpoint& checkpoint,
                                                  const ModelConfig& config);

// Errors: as CheckCheckpoint, and those of the backend.
absl::StatusOr<Weights> LoadWeights(std::unique_ptr<Checkpoint> checkpoint,
                                    const ModelConfig& config, kernels::Backend& backend);

// Host values -> device memory.
absl::StatusOr<DeviceVector> Upload(const std::vector<float>& values, kernels::Backend& backend);
absl::StatusOr<DeviceVector> Upload(const std::vector<int32_t>& values, kernels::Backend& backend);

// Hex digest of config.json's text and the list of tensors (name, dtype, shape).
std::string WeightsDigest(std::string_view config_json, const Checkpoint& checkpoint);

}  // namespace model

#endif  // MODEL_WEIGHTS_H_

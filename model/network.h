// Network: one model's mathematics over a StepPlan.  One implementation per family (deepseek_v2.h
// for V2 and V3, deepseek_v32.h for V3.2).  No scheduling, no cache policy: the plan says which
// rows exist and where they go.
//
// Where the latent cache is written: Forward calls StoreKv for every new row of a layer first.
// Where it is read: absorbed sequences by AbsorbedDecode through the block table; ragged sequences
// by GatherKv in pieces that start at absolute multiples of `piece_tokens`, decompressed and
// attended with RaggedMha, merged by log-sum-exp in ascending order.  Because attention always
// reads the *stored* form and the pieces do not depend on chunk boundaries, chunked = whole bit for
// bit.
//
// Thread-compatible: one executor thread calls Forward.

#ifndef MODEL_NETWORK_H_
#define MODEL_NETWORK_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "model/cache_spec.h"
#include "model/config.h"
#include "model/step_plan.h"

namespace model {

// Device memory a step writes its results to; owned by the engine, one per step in flight.
struct StepOutput {
  kernels::SampleResult* results = nullptr;  // [max_samples]
  int32_t* sampled_ids = nullptr;            // [max_samples]
  float* logits = nullptr;                   // [max_logit_rows, vocab]
};

// Memory the network reads and writes besides its own weights and scratch.
struct StepState {
  std::byte* cache = nullptr;  // block 0 of the token blocks
  // Slot 0, null when the model keeps no state.  Before Forward slot StepPlan::state_slots[s] holds
  // what Forward left there after the sequence's earlier rows, or zeros; Forward advances it in
  // place by the new rows.  Its bytes are the network's own, but they depend on the tokens alone: a
  // slot is copied, kept as a snapshot and sent to other workers.
  std::byte* state_slots = nullptr;
  kernels::PenaltyState penalties = {};
  const int32_t* previous_sampled = nullptr;  // sampled_ids of the previous step
};

class Network {
 public:
  virtual ~Network() = default;
  virtual const ModelConfig& config() const = 0;
  virtual const CacheLayout& cache_layout() const = 0;
  // Hex digest of config.json and the tensor list (names, dtypes, shapes).
  virtual const std::string& weights_digest() const = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t skipped_tensors() const = 0;  // unknown ones, MTP layers among them
  virtual int32_t max_model_len() const = 0;

  // Runs the plan: copies, embedding, layers, head and sampling.  The launches of a decode step
  // depend on the plan's counts alone, apart from what the device reads of it: they may be recorded
  // and replayed for other plans of the same counts.
  // Errors: kInternal from the device; the engine is then unusable.
  virtual absl::Status Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                               const StepState& state, const StepOutput& output) = 0;
};

struct NetworkOptions {
  KvCacheDtype kv_cache_dtype = KvCacheDtype::kFloat32;
  int32_t block_size = 64;
  StepLimits limits;            // scratch is allocated for these
  int32_t max_model_len = 0;    // 0: the checkpoint's max_position_embeddings
  int32_t piece_tokens = 0;     // keys decompressed at a time in ragged prefill; 0: what suits
                                // the device
  bool random_weights = false;  // model_dir needs a config.json only (random_tensors.h)
};

// Opens the checkpoint, checks every tensor's shape and dtype, packs the weights.
// Errors: kNotFound, kInvalidArgument: one sentence naming file, tensor, expected and found.
absl::StatusOr<std::unique_ptr<Network>> LoadNetwork(const std::string& model_dir,
                                                     const NetworkOptions& options,
                                                     kernels::Backend& backend);

}  // namespace model

#endif  // MODEL_NETWORK_H_

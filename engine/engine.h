// Engine: one device stepping plans over a cache.  No network, no text, no scheduling.
//
// Asynchronous: Launch enqueues a plan and returns; Collect waits for it.  At most two steps may be
// in flight, executed in order of launch.  An input token may be "what the previous step sampled"
// (StepPlan::token_source), so the next step can be launched before this one is collected; the end
// of a sequence is then learned one step late.
//
// A launched plan must stay untouched until its step is collected: keep two plans and alternate.
// After an error of Collect the engine is broken: every later call returns the same error.
//
// Thread-compatible: the scheduler thread makes every call.  Inside, one executor thread runs
// steps.

#ifndef ENGINE_ENGINE_H_
#define ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/device_copies.h"
#include "model/network.h"

namespace engine {

inline constexpr int32_t kMaxThreads = 4096;  // of a CPU; more are a mistyped number

struct EngineOptions {
  std::string model_dir;
  std::string device = "cpu";           // "cpu" or "cuda"
  std::string dtype = "auto";           // activations: auto, float32, bfloat16
  std::string kv_cache_dtype = "auto";  // auto, float32, bfloat16, fp8; auto: the activations' type
  int32_t num_threads = 0;              // CPU; 0: all cores this process may use
  int32_t block_size = 0;               // tokens; 0: the model's (model::DefaultBlockSize)
  int32_t max_model_len = 0;            // tokens; 0: the checkpoint's
  int32_t num_penalty_slots = 64;       // sequences with penalties at a time
  bool random_weights = false;          // of model_dir only the config is read (for measuring)
  model::StepLimits limits;             // max_blocks_per_seq, sliding_window are the model's
};

// What a step returned, in plan order.  Valid until the step after next is launched.
struct StepResult {
  absl::Span<const kernels::SampleResult> samples;  // [num_samples]
  absl::Span<const float> logits;                   // [num_logit_rows, vocab]
  double step_ms = 0;                               // time on the device
};

using StepHandle = int64_t;

// The memory of a cache.
struct CacheSpans {
  absl::Span<std::byte> token_blocks;  // num_blocks * block_bytes
  absl::Span<std::byte> state_slots;   // num_slots * state_slot_bytes; empty: no state is kept
};

class Engine {
 public:
  // Loads the model.  The cache comes later (SetCache), when the caller knows its size from
  // cache_layout() and has mapped and registered it.
  // Errors: kInvalidArgument, kNotFound: one sentence for the operator.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;

  virtual const model::Network& network() const = 0;
  virtual const model::CacheLayout& cache_layout() const = 0;
  virtual const model::StepLimits& limits() const = 0;
  virtual int32_t num_penalty_slots() const = 0;

  // `token_blocks`: num_blocks * block_bytes.  `state_slots`: num_slots * state_slot_bytes, empty
  // if the model keeps no state; slot 0 is zero and stays so.  Both must outlive the engine.
  // REQUIRES: no step launched yet.
  // On a device with memory of its own the cache lies there, zero at first and as large as what is
  // given here, of which no byte is touched; if it does not fit, Launch says so.
  virtual void SetCache(absl::Span<std::byte> token_blocks, absl::Span<std::byte> state_slots) = 0;
  // Where the cache lies; what the collected steps have written is there.
  virtual CacheSpans cache() const = 0;
  // Copies from and to a cache that only the device sees; null: the host sees it.  The engine must
  // outlive them.
  virtual absl::StatusOr<std::unique_ptr<kernels::DeviceCopies>> MakeCopies() { return nullptr; }

  // REQUIRES: SetCache was called; fewer than two steps in flight; plan has the engine's limits.
  virtual absl::StatusOr<StepHandle> Launch(const model::StepPlan& plan) = 0;
  // Blocks until the step is done.  REQUIRES: handles are collected in order of launch.
  virtual absl::StatusOr<StepResult> Collect(StepHandle handle) = 0;
};

// 16 bytes: cache bytes of engines with equal fingerprints are interchangeable.
std::string LayoutFingerprint(const Engine& engine, const std::string& model_name);

}  // namespace engine

#endif  // ENGINE_ENGINE_H_

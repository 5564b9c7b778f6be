// A network on the CPU backend with a cache of its own, stepped by hand: what the model's tests
// share. The cache and the state slots start full of NaN bytes, so that reading what nobody wrote
// shows.

#ifndef TESTS_MODEL_NETWORK_RUNNER_H_
#define TESTS_MODEL_NETWORK_RUNNER_H_

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/decode_shape.h"
#include "engine/plan_builder.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kv_entry.h"
#include "model/network.h"
#include "model/safetensors.h"
#include "status/check.h"
#include "tests/model/golden_case.h"

namespace model {

class NetworkRunner {
 public:
  static constexpr int32_t kBlockSize = 64;  // V4: its default
  static constexpr int32_t kNumBlocks = 64;
  static constexpr int32_t kNumStateSlots = 48;

  struct Part {
    engine::Sequence* seq;
    int32_t num_tokens;
    bool absorbed = false;
  };

  static NetworkOptions Options() {
    NetworkOptions options;
    options.block_size = kBlockSize;
    options.max_model_len = 1024;
    options.limits.max_tokens = 512;
    options.limits.max_absorbed_tokens = 64;
    options.limits.max_seqs = 16;
    options.limits.max_blocks_per_seq = 16;
    options.limits.max_logit_rows = 512;
    return options;
  }

  explicit NetworkRunner(const std::string& model_dir, const NetworkOptions& options = Options(),
                         int32_t num_threads = 1)
      : options_(ForModel(model_dir, options)),
        backend_(kernels::cpu::CreateCpuBackend(num_threads)) {
    absl::StatusOr<std::unique_ptr<Network>> network = LoadNetwork(model_dir, options_, *backend_);
    FERRY_CHECK(network.ok()) << network.status().ToString();
    network_ = std::move(*network);
    cache_.resize(kNumBlocks * network_->cache_layout().block_bytes());
    state_slots_.resize(kNumStateSlots * network_->cache_layout().spec().state_slot_bytes);
    Reset();
    logits_ = *backend_->Allocate(int64_t{options.limits.max_logit_rows} *
                                  network_->config().vocab_size * sizeof(float));
    results_.resize(options.limits.max_samples);
    sampled_.resize(options.limits.max_samples);
  }

  const Network& network() const { return *network_; }
  int32_t vocab_size() const { return network_->config().vocab_size; }
  int32_t block_size() const { return options_.block_size; }

  // Forgets everything: blocks and slots are free, the cache is NaN.
  void Reset() {
    std::memset(cache_.data(), 0xff, cache_.size());
    if (!state_slots_.empty()) std::memset(state_slots_.data(), 0xff, state_slots_.size());
    num_state_slots_ = 0;
    pool_ = std::make_unique<engine::BlockPool>(kNumBlocks);
  }

  engine::Sequence NewSequence(absl::Span<const int32_t> tokens) {
    engine::Sequence seq;
    if (!state_slots_.empty()) {
      FERRY_CHECK(num_state_slots_ < kNumStateSlots) << "slots=" << kNumStateSlots;
      seq.state_slot = num_state_slots_++;
    }
    seq.tokens.assign(tokens.begin(), tokens.end());
    seq.num_prompt_tokens = static_cast<int32_t>(tokens.size());
    return seq;
  }

  // One step.  Returns the logits of every row, [rows, vocab].  Decodes may be padded to more.
  std::vector<float> Step(absl::Span<const Part> parts, int32_t padded_seqs = 0) {
    StepPlan plan(options_.limits);
    engine::PlanBuilder builder(block_size(), plan);
    builder.Begin(++step_id_);
    for (const Part& part : parts) {
      const absl::Status grown = engine::GrowBlocks(
          *part.seq, part.seq->num_computed + part.num_tokens, block_size(), *pool_);
      FERRY_CHECK(grown.ok()) << grown.ToString();
      builder.Add(*part.seq, part.num_tokens, part.absorbed, /*sample=*/false, /*logits=*/true);
    }
    if (padded_seqs > 0) {
      engine::PadDecode({.num_seqs = padded_seqs, .num_splits = plan.counts().num_splits}, plan);
    }
    const absl::Status status = network_->Forward(
        {}, plan,
        {.cache = cache_.data(),
         .state_slots = state_slots_.empty() ? nullptr : state_slots_.data()},
        {.results = results_.data(), .sampled_ids = sampled_.data(), .logits = logits_->floats()});
    FERRY_CHECK(status.ok()) << status.ToString();
    const float* logits = logits_->floats();
    return std::vector<float>(logits,
                              logits + int64_t{plan.counts().num_logit_rows} * vocab_size());
  }

  // Computes `tokens` in ragged chunks, then (from `absorbed_from` on) one by one in absorbed form.
  std::vector<float> Run(engine::Sequence& seq, int32_t chunk, int32_t absorbed_from = 1 << 30) {
    std::vector<float> logits;
    const int32_t num_tokens = static_cast<int32_t>(seq.tokens.size());
    while (seq.num_computed < num_tokens) {
      const bool absorbed = seq.num_computed >= absorbed_from;
      const int32_t end = absorbed
                              ? seq.num_computed + 1
                              : std::min({seq.num_computed + chunk, num_tokens, absorbed_from});
      const Part part{&seq, end - seq.num_computed, absorbed};
      const std::vector<float> more = Step({&part, 1});
      logits.insert(logits.end(), more.begin(), more.end());
    }
    return logits;
  }

  // The stored entries of a sequence, all groups and layers, in position order, and its state.
  std::string CacheBytes(const engine::Sequence& seq) {
    const CacheLayout& layout = network_->cache_layout();
    const ModelConfig& config = network_->config();
    std::string bytes;
    for (size_t i = 0; i < layout.spec().groups.size(); ++i) {
      const CacheGroup& group = layout.spec().groups[i];
      const bool index_key = group.name.find("index_key") != std::string::npos;
      const int32_t rope_dim = index_key ? 0 : config.qk_rope_head_dim;
      const int32_t dim = index_key                ? config.index_head_dim
                          : group.name == "latent" ? config.kv_lora_rank
                                                   : config.qk_nope_head_dim;
      // Copied one by one: in some formats the parts of an entry do not lie together.
      std::string entry(static_cast<size_t>(group.entry_bytes), '\0');
      const kernels::KvPages one{.base = reinterpret_cast<std::byte*>(entry.data()),
                                 .block_stride = group.entry_bytes,
                                 .block_size = 1,
                                 .entry_bytes = group.entry_bytes,
                                 .format = group.format};
      for (int32_t layer = 0; layer < group.layers; ++layer) {
        const kernels::KvPages pages = layout.Pages(cache_.data(), static_cast<int32_t>(i), layer);
        for (int32_t e = 0; e < seq.num_computed / group.tokens_per_entry; ++e) {
          const int64_t slot =
              int64_t{seq.blocks[e / pages.block_size]} * pages.block_size + e % pages.block_size;
          kernels::cpu::CopyEntry(pages, kernels::cpu::PlaceOfSlot(pages, slot), one,
                                  kernels::cpu::PlaceOfSlot(one, 0), dim, rope_dim);
          bytes += entry;
        }
      }
    }
    if (seq.state_slot >= 0) {
      const int64_t slot_bytes = layout.spec().state_slot_bytes;
      bytes.append(reinterpret_cast<const char*>(state_slots_.data() + seq.state_slot * slot_bytes),
                   static_cast<size_t>(slot_bytes));
    }
    return bytes;
  }

  // A sequence of `source` with its blocks and its state moved here as bytes.
  engine::Sequence Receive(const NetworkRunner& source, const engine::Sequence& sent) {
    engine::Sequence seq = NewSequence(sent.tokens);
    CopyFrom(source, sent, seq);
    return seq;
  }
  // The same within this runner, into a sequence that is already there.
  void CopyInto(const engine::Sequence& from, engine::Sequence& to) { CopyFrom(*this, from, to); }

  engine::BlockPool& pool() { return *pool_; }

 private:
  void CopyFrom(const NetworkRunner& source, const engine::Sequence& from, engine::Sequence& to) {
    const int64_t block_bytes = network_->cache_layout().block_bytes();
    const int64_t slot_bytes = network_->cache_layout().spec().state_slot_bytes;
    const absl::Status grown = engine::GrowBlocks(to, from.num_computed, block_size(), *pool_);
    FERRY_CHECK(grown.ok()) << grown.ToString();
    for (int32_t i = 0; i < engine::BlocksFor(from.num_computed, block_size()); ++i) {
      std::memcpy(cache_.data() + to.blocks[i] * block_bytes,
                  source.cache_.data() + from.blocks[i] * block_bytes,
                  static_cast<size_t>(block_bytes));
    }
    if (slot_bytes > 0) {
      std::memcpy(state_slots_.data() + to.state_slot * slot_bytes,
                  source.state_slots_.data() + from.state_slot * slot_bytes,
                  static_cast<size_t>(slot_bytes));
    }
    to.num_computed = from.num_computed;
  }

  static NetworkOptions ForModel(const std::string& model_dir, NetworkOptions options) {
    const absl::StatusOr<ModelConfig> config = LoadModelConfig(model_dir);
    FERRY_CHECK(config.ok()) << config.status().ToString();
    options.limits.sliding_window = config->sliding_window;
    if (options.block_size == kBlockSize) options.block_size = DefaultBlockSize(*config);
    return options;
  }

  const NetworkOptions options_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Network> network_;
  std::vector<std::byte> cache_;
  std::vector<std::byte> state_slots_;
  int32_t num_state_slots_ = 0;  // given out
  std::unique_ptr<engine::BlockPool> pool_;
  std::unique_ptr<kernels::Buffer> logits_;
  std::vector<kernels::SampleResult> results_;
  std::vector<int32_t> sampled_;
  int64_t step_id_ = 0;
};

}  // namespace model

#endif  // TESTS_MODEL_NETWORK_RUNNER_H_

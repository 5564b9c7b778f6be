#include "tests/decode_worker/fake_engine.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "model/cache_spec.h"
#include "model/network.h"
#include "status/check.h"

namespace decode_worker {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b + 0x7F4A7C15u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 32;
  return x;
}

// What the sampled token depends on besides the sequence's entries.
struct Draw {
  float temperature;
  uint64_t seed;
  uint32_t branch;
  uint32_t position;
  uint64_t penalties;  // of the counts; 0: none
  absl::Span<const int32_t> banned;
};

int32_t Sample(uint64_t digest, const Draw& draw, int32_t vocab_size) {
  uint64_t x = Mix(digest, draw.position);
  if (draw.temperature > 0) x = Mix(Mix(x, draw.seed), draw.branch);
  if (draw.penalties != 0) x = Mix(x, draw.penalties);
  auto token = static_cast<int32_t>(x % static_cast<uint64_t>(vocab_size));
  while (std::find(draw.banned.begin(), draw.banned.end(), token) != draw.banned.end()) {
    token = (token + 1) % vocab_size;
  }
  return token;
}

struct Entry {
  uint64_t digest;
  int64_t position;
};

Entry EntryOf(int32_t token, int64_t position) {
  return {.digest = Mix(static_cast<uint64_t>(token) + 1, static_cast<uint64_t>(position)),
          .position = position};
}

uint64_t Absorb(uint64_t state, const Entry& entry, int64_t position) {
  // An entry of another position shows as another text.
  return Mix(state, entry.digest + static_cast<uint64_t>(entry.position != position));
}

// Order-free digest of token counts, as a penalty slot keeps them.
struct PenaltyCounts {
  uint64_t prompt = 0;
  uint64_t output = 0;
  uint64_t digest() const { return Mix(prompt, output) | 1; }
  void AddPrompt(int32_t token) { prompt += Mix(3, static_cast<uint64_t>(token)); }
  void AddOutput(int32_t token) { output += Mix(5, static_cast<uint64_t>(token)); }
};

class FakeNetwork final : public model::Network {
 public:
  FakeNetwork(const FakeEngineOptions& options, model::CacheLayout layout)
      : layout_(std::move(layout)), max_model_len_(options.max_model_len) {
    config_.vocab_size = options.vocab_size;
  }
  const model::ModelConfig& config() const override { return config_; }
  const model::CacheLayout& cache_layout() const override { return layout_; }
  const std::string& weights_digest() const override { return digest_; }
  int64_t weight_bytes() const override { return 0; }
  int64_t skipped_tensors() const override { return 0; }
  int32_t max_model_len() const override { return max_model_len_; }
  absl::Status Forward(const kernels::LaunchContext&, const model::StepPlan&,
                       const model::StepState&, const model::StepOutput&) override {
    return absl::UnimplementedError("the fake engine does not call its network");
  }

 private:
  model::ModelConfig config_;
  const model::CacheLayout layout_;
  const std::string digest_ = "fake";
  const int32_t max_model_len_;
};

model::CacheSpec MakeSpec() {
  model::CacheSpec spec;
  spec.groups.push_back({.name = "latent",
                         .layers = 1,
                         .entry_bytes = sizeof(Entry),
                         .tokens_per_entry = 1,
                         .format = kernels::KvFormat::kFloat32});
  return spec;
}

class FakeEngineImpl final : public FakeEngine {
 public:
  explicit FakeEngineImpl(const FakeEngineOptions& options)
      : options_(options),
        network_(options, model::CacheLayout(MakeSpec())),
        limits_(options.limits),
        penalties_(static_cast<size_t>(options.num_penalty_slots)) {
    limits_.max_blocks_per_seq = (options.max_model_len + 63) / 64;
  }

  const model::Network& network() const override { return network_; }
  const model::CacheLayout& cache_layout() const override { return network_.cache_layout(); }
  const model::StepLimits& limits() const override { return limits_; }
  int32_t num_penalty_slots() const override { return options_.num_penalty_slots; }

  void SetCache(absl::Span<std::byte> token_blocks, absl::Span<std::byte> state_slots) override {
    cache_ = token_blocks.data();
    spans_ = {.token_blocks = token_blocks, .state_slots = state_slots};
  }
  engine::CacheSpans cache() const override { return spans_; }

  absl::StatusOr<engine::StepHandle> Launch(const model::StepPlan& plan) override {
    FERRY_CHECK(launched_.size() < 2) << "three steps in flight";
    FERRY_CHECK(plan.limits() == limits_) << "limits differ";
    launched_.push_back(&plan);
    return next_launch_++;
  }

  absl::StatusOr<engine::StepResult> Collect(engine::StepHandle handle) override {
    FERRY_CHECK(handle == next_collect_ && !launched_.empty()) << "handle=" << handle;
    {
      std::unique_lock lock(mutex_);
      go_.wait(lock, [this] { return !held_; });
      if (fail_after_ > 0 && --fail_after_ == 0) broken_ = true;
      if (broken_) return absl::InternalError("the fake device is gone");
    }
    ++next_collect_;
    const model::StepPlan& plan = *launched_.front();
    launched_.pop_front();
    std::vector<kernels::SampleResult>& results = results_[static_cast<size_t>(handle % 2)];
    Execute(plan, results);
    return engine::StepResult{.samples = results, .logits = {}, .step_ms = 0.5};
  }

  void Hold() override {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  void Go() override {
    {
      std::lock_guard lock(mutex_);
      held_ = false;
    }
    go_.notify_all();
  }
  void FailAfter(int32_t steps) override {
    std::lock_guard lock(mutex_);
    fail_after_ = steps;
  }

 private:
  static constexpr int64_t kBlockSize = 64;

  std::byte* At(int64_t block, int64_t offset) const {
    return cache_ + block * cache_layout().block_bytes() +
           offset * static_cast<int64_t>(sizeof(Entry));
  }

  void Execute(const model::StepPlan& plan, std::vector<kernels::SampleResult>& results) {
    const model::StepCounts& counts = plan.counts();
    for (int32_t i = 0; i < counts.num_copies; ++i) {
      std::memcpy(At(plan.copy_dst[i], 0), At(plan.copy_src[i], 0),
                  static_cast<size_t>(cache_layout().block_bytes()));
    }
    for (int32_t row = 0; row < counts.num_tokens; ++row) {
      const int32_t source = plan.token_source[row];
      const int32_t token =
          source >= 0 ? previous_.at(static_cast<size_t>(source)) : plan.token_ids[row];
      const Entry entry = EntryOf(token, plan.positions[row]);
      const int64_t slot = plan.slots[row];
      std::memcpy(At(slot / kBlockSize, slot % kBlockSize), &entry, sizeof(entry));
    }
    for (int32_t i = 0; i < counts.num_penalty_resets; ++i) {
      const kernels::PenaltyReset& reset = plan.penalty_resets[i];
      PenaltyCounts& slot = penalties_.at(static_cast<size_t>(reset.slot));
      slot = {};
      const int32_t* tokens = plan.history_tokens + reset.begin;
      for (int32_t t = 0; t < reset.prompt_len; ++t) slot.AddPrompt(tokens[t]);
      for (int32_t t = 0; t < reset.output_len; ++t) slot.AddOutput(tokens[reset.prompt_len + t]);
    }
    results.assign(static_cast<size_t>(counts.num_samples), {});
    std::vector<int32_t> sampled(static_cast<size_t>(counts.num_samples));
    for (int32_t i = 0; i < counts.num_samples; ++i) {
      const kernels::SampleRow& sample = plan.samples[i];
      const int32_t seq = plan.row_to_seq[sample.row];
      uint64_t digest = 0;
      for (int64_t p = 0; p <= plan.positions[sample.row]; ++p) {
        const int32_t block = plan.block_table[seq * plan.block_table_stride() + p / kBlockSize];
        Entry entry;
        std::memcpy(&entry, At(block, p % kBlockSize), sizeof(entry));
        digest = Absorb(digest, entry, p);
      }
      PenaltyCounts* const slot = sample.penalty_slot >= 0
                                      ? &penalties_.at(static_cast<size_t>(sample.penalty_slot))
                                      : nullptr;
      const int32_t token =
          Sample(digest,
                 {.temperature = sample.temperature,
                  .seed = sample.seed,
                  .branch = sample.branch,
                  .position = sample.position,
                  .penalties = slot == nullptr ? 0 : slot->digest(),
                  .banned = {sample.banned, static_cast<size_t>(sample.num_banned)}},
                 options_.vocab_size);
      if (options_.poison_seed != 0 && sample.seed == options_.poison_seed &&
          sample.position >= options_.poison_position) {
        results[static_cast<size_t>(i)].token_id = kernels::kNoToken;
        continue;  // the next step's input is token 0
      }
      if (slot != nullptr) slot->AddOutput(token);
      results[static_cast<size_t>(i)].token_id = token;
      results[static_cast<size_t>(i)].logprob = -1.0f - static_cast<float>(token);
      for (int32_t t = 0; t < std::max(0, sample.num_logprobs); ++t) {
        results[static_cast<size_t>(i)].top_ids[t] = t;
        results[static_cast<size_t>(i)].top_logprobs[t] = -static_cast<float>(t);
      }
      sampled[static_cast<size_t>(i)] = token;
    }
    previous_ = std::move(sampled);
  }

  const FakeEngineOptions options_;
  const FakeNetwork network_;
  model::StepLimits limits_;
  std::byte* cache_ = nullptr;
  engine::CacheSpans spans_;
  std::vector<PenaltyCounts> penalties_;
  std::deque<const model::StepPlan*> launched_;
  engine::StepHandle next_launch_ = 0;
  engine::StepHandle next_collect_ = 0;
  std::array<std::vector<kernels::SampleResult>, 2> results_;
  std::vector<int32_t> previous_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable go_;
  bool held_ = false;
  bool broken_ = false;
  int32_t fail_after_ = 0;
};

}  // namespace

std::unique_ptr<FakeEngine> CreateFakeEngine(const FakeEngineOptions& options) {
  return std::make_unique<FakeEngineImpl>(options);
}

std::vector<int32_t> ReferenceTokens(const std::vector<int32_t>& prompt,
                                     const engine::SamplingOptions& sampling, int32_t branch,
                                     int32_t vocab_size) {
  uint64_t digest = 0;
  PenaltyCounts counts;
  int64_t position = 0;
  for (const int32_t token : prompt) {
    digest = Absorb(digest, EntryOf(token, position), position);
    counts.AddPrompt(token);
    ++position;
  }
  std::vector<int32_t> output;
  const std::vector<int32_t>& stops = sampling.stop_token_ids;
  while (static_cast<int32_t>(output.size()) < sampling.max_tokens) {
    const bool ban = static_cast<int32_t>(output.size()) < sampling.min_tokens;
    const int32_t token =
        Sample(digest,
               {.temperature = sampling.temperature,
                .seed = sampling.seed,
                .branch = static_cast<uint32_t>(branch),
                .position = static_cast<uint32_t>(position),
                .penalties = sampling.HasPenalties() ? counts.digest() : 0,
                .banned = ban ? absl::MakeConstSpan(stops) : absl::Span<const int32_t>()},
               vocab_size);
    output.push_back(token);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    digest = Absorb(digest, EntryOf(token, position), position);
    counts.AddOutput(token);
    ++position;
  }
  return output;
}

}  // namespace decode_worker

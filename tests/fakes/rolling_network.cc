#include "tests/fakes/rolling_network.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "engine/executor.h"
#include "kernels/cpu/cpu_backend.h"
#include "model/cache_spec.h"
#include "status/check.h"
#include "xxhash.h"

namespace fakes {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b + 0x7F4A7C15u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

model::CacheSpec SpecOf(const RollingOptions& options) {
  model::CacheSpec spec;
  spec.block_size = options.block_size;
  spec.state_slot_bytes = options.state_slot_bytes;
  spec.groups = {{.name = "each", .layers = 2, .entry_bytes = 24, .tokens_per_entry = 1},
                 {.name = "four", .layers = 3, .entry_bytes = 40, .tokens_per_entry = 4},
                 {.name = "many", .layers = 1, .entry_bytes = 72, .tokens_per_entry = 64}};
  return spec;
}

// The state: words[0] digest, words[1] number of tokens, the rest a ring.
void Advance(absl::Span<uint64_t> words, int32_t token, int64_t position) {
  // A state that stands elsewhere, or is not this sequence's, shows for good.
  words[0] = Mix(words[0] + (words[1] == static_cast<uint64_t>(position) ? 0 : 1),
                 static_cast<uint64_t>(token) + 1);
  ++words[1];
  const size_t ring = words.size() - 2;
  uint64_t& word = words[2 + static_cast<size_t>(position) % ring];
  word = Mix(word, words[0]);
}

// One entry's bytes, of the digest behind its last token.
void FillEntry(uint64_t digest, int32_t group, int32_t layer, absl::Span<std::byte> entry) {
  uint64_t x = Mix(digest, static_cast<uint64_t>(group * 64 + layer));
  for (size_t i = 0; i < entry.size(); i += sizeof(x)) {
    x = Mix(x, i);
    std::memcpy(entry.data() + i, &x, std::min(sizeof(x), entry.size() - i));
  }
}

uint64_t Absorb(uint64_t digest, absl::Span<const std::byte> entry) {
  return Mix(digest, XXH3_64bits(entry.data(), entry.size()));
}

struct Draw {
  float temperature;
  uint64_t seed;
  uint32_t branch;
  uint32_t position;
  absl::Span<const int32_t> banned;
};

int32_t Sample(uint64_t digest, const Draw& draw, int32_t vocab_size) {
  uint64_t x = Mix(digest, draw.position);
  if (draw.temperature > 0) x = Mix(Mix(x, draw.seed), draw.branch);
  auto token = static_cast<int32_t>(x % static_cast<uint64_t>(vocab_size));
  while (std::find(draw.banned.begin(), draw.banned.end(), token) != draw.banned.end()) {
    token = (token + 1) % vocab_size;
  }
  return token;
}

class RollingNetwork final : public model::Network {
 public:
  explicit RollingNetwork(const RollingOptions& options)
      : layout_(SpecOf(options)),
        max_model_len_(options.max_model_len),
        poison_seed_(options.poison_seed) {
    FERRY_CHECK(layout_.spec().Validate().ok()) << layout_.spec().Validate();
    config_.vocab_size = options.vocab_size;
  }
  const model::ModelConfig& config() const override { return config_; }
  const model::CacheLayout& cache_layout() const override { return layout_; }
  const std::string& weights_digest() const override { return digest_; }
  int64_t weight_bytes() const override { return 0; }
  int64_t skipped_tensors() const override { return 0; }
  int32_t max_model_len() const override { return max_model_len_; }

  absl::Status Forward(const kernels::LaunchContext&, const model::StepPlan& plan,
                       const model::StepState& state, const model::StepOutput& output) override {
    const model::StepCounts& counts = plan.counts();
    for (int32_t i = 0; i < counts.num_copies; ++i) {
      std::memcpy(state.cache + plan.copy_dst[i] * layout_.block_bytes(),
                  state.cache + plan.copy_src[i] * layout_.block_bytes(),
                  static_cast<size_t>(layout_.block_bytes()));
    }
    for (int32_t row = 0; row < counts.num_tokens; ++row) {
      const int32_t source = plan.token_source[row];
      AddToken(plan, plan.row_to_seq[row], plan.positions[row],
               source >= 0 ? state.previous_sampled[source] : plan.token_ids[row], state);
    }
    std::vector<int32_t> sampled(static_cast<size_t>(counts.num_samples));
    for (int32_t i = 0; i < counts.num_samples; ++i) {
      const kernels::SampleRow& sample = plan.samples[i];
      sampled[i] =
          Sample(Digest(plan, plan.row_to_seq[sample.row], plan.positions[sample.row], state),
                 {.temperature = sample.temperature,
                  .seed = sample.seed,
                  .branch = sample.branch,
                  .position = sample.position,
                  .banned = {sample.banned, static_cast<size_t>(sample.num_banned)}},
                 config_.vocab_size);
      const bool poisoned = poison_seed_ != 0 && sample.seed == poison_seed_;
      output.results[i] = {.token_id = poisoned ? kernels::kNoToken : sampled[i], .logprob = -1.0f};
    }
    std::copy(sampled.begin(), sampled.end(), output.sampled_ids);
    return absl::OkStatus();
  }

 private:
  absl::Span<uint64_t> Words(const model::StepPlan& plan, int32_t seq,
                             const model::StepState& state) const {
    const int64_t bytes = layout_.spec().state_slot_bytes;
    return {reinterpret_cast<uint64_t*>(state.state_slots + plan.state_slots[seq] * bytes),
            static_cast<size_t>(bytes) / sizeof(uint64_t)};
  }

  absl::Span<std::byte> Entry(const model::StepPlan& plan, int32_t seq, int32_t group,
                              int32_t layer, int32_t entry, const model::StepState& state) const {
    const model::CacheGroup& spec = layout_.spec().groups[group];
    const int32_t per_block = layout_.spec().block_size / spec.tokens_per_entry;
    const int64_t block = plan.block_table[seq * plan.block_table_stride() + entry / per_block];
    return {state.cache + block * layout_.block_bytes() + layout_.offset(group, layer) +
                entry % per_block * spec.entry_bytes,
            static_cast<size_t>(spec.entry_bytes)};
  }

  template <typename Visit>
  void ForEachLayer(Visit visit) const {
    const auto& groups = layout_.spec().groups;
    for (int32_t group = 0; group < static_cast<int32_t>(groups.size()); ++group) {
      for (int32_t layer = 0; layer < groups[group].layers; ++layer) visit(group, layer);
    }
  }

  void AddToken(const model::StepPlan& plan, int32_t seq, int32_t position, int32_t token,
                const model::StepState& state) const {
    uint64_t digest = Mix(static_cast<uint64_t>(token), static_cast<uint64_t>(position));
    if (layout_.spec().state_slot_bytes > 0) {
      const absl::Span<uint64_t> words = Words(plan, seq, state);
      Advance(words, token, position);
      digest = words[0];
    }
    ForEachLayer([&](int32_t group, int32_t layer) {
      const int32_t tokens = layout_.spec().groups[group].tokens_per_entry;
      if ((position + 1) % tokens != 0) return;
      FillEntry(digest, group, layer, Entry(plan, seq, group, layer, position / tokens, state));
    });
  }

  uint64_t Digest(const model::StepPlan& plan, int32_t seq, int32_t position,
                  const model::StepState& state) const {
    uint64_t digest = 0;
    if (layout_.spec().state_slot_bytes > 0) {
      const absl::Span<uint64_t> words = Words(plan, seq, state);
      digest = XXH3_64bits(words.data(), words.size() * sizeof(uint64_t));
    }
    ForEachLayer([&](int32_t group, int32_t layer) {
      const int32_t entries = (position + 1) / layout_.spec().groups[group].tokens_per_entry;
      for (int32_t entry = 0; entry < entries; ++entry) {
        digest = Absorb(digest, Entry(plan, seq, group, layer, entry, state));
      }
    });
    return digest;
  }

  model::ModelConfig config_;
  const model::CacheLayout layout_;
  const std::string digest_ = "rolling";
  const int32_t max_model_len_;
  const uint64_t poison_seed_;
};

}  // namespace

std::unique_ptr<model::Network> CreateRollingNetwork(const RollingOptions& options) {
  return std::make_unique<RollingNetwork>(options);
}

std::unique_ptr<engine::Engine> CreateRollingEngine(const RollingOptions& options) {
  model::StepLimits limits = options.limits;
  limits.max_blocks_per_seq = (options.max_model_len + options.block_size - 1) / options.block_size;
  limits.max_history_tokens = std::max(limits.max_history_tokens, options.max_model_len);
  return *engine::Executor::Create(kernels::cpu::CreateCpuBackend(1), CreateRollingNetwork(options),
                                   limits, options.num_penalty_slots);
}

std::vector<int32_t> RollingReference(const RollingOptions& options,
                                      const std::vector<int32_t>& prompt,
                                      const engine::SamplingOptions& sampling, int32_t branch) {
  const model::CacheSpec spec = SpecOf(options);
  std::vector<uint64_t> words(static_cast<size_t>(options.state_slot_bytes) / sizeof(uint64_t));
  // Digests behind each token: what entries are made of.
  std::vector<uint64_t> digests;
  const auto add = [&](int32_t token) {
    const auto position = static_cast<int64_t>(digests.size());
    if (words.empty()) {
      digests.push_back(Mix(static_cast<uint64_t>(token), static_cast<uint64_t>(position)));
      return;
    }
    Advance(absl::MakeSpan(words), token, position);
    digests.push_back(words[0]);
  };
  const auto digest = [&] {
    uint64_t result =
        words.empty() ? 0 : XXH3_64bits(words.data(), words.size() * sizeof(uint64_t));
    for (int32_t group = 0; group < static_cast<int32_t>(spec.groups.size()); ++group) {
      const model::CacheGroup& g = spec.groups[group];
      std::vector<std::byte> entry(static_cast<size_t>(g.entry_bytes));
      for (int32_t layer = 0; layer < g.layers; ++layer) {
        for (size_t last = g.tokens_per_entry - 1; last < digests.size();
             last += g.tokens_per_entry) {
          FillEntry(digests[last], group, layer, absl::MakeSpan(entry));
          result = Absorb(result, entry);
        }
      }
    }
    return result;
  };
  for (const int32_t token : prompt) add(token);
  std::vector<int32_t> output;
  const std::vector<int32_t>& stops = sampling.stop_token_ids;
  while (static_cast<int32_t>(output.size()) < sampling.max_tokens) {
    const bool ban = static_cast<int32_t>(output.size()) < sampling.min_tokens;
    const int32_t token =
        Sample(digest(),
               {.temperature = sampling.temperature,
                .seed = sampling.seed,
                .branch = static_cast<uint32_t>(branch),
                .position = static_cast<uint32_t>(digests.size()),
                .banned = ban ? absl::MakeConstSpan(stops) : absl::Span<const int32_t>()},
               options.vocab_size);
    output.push_back(token);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    add(token);
  }
  return output;
}

}  // namespace fakes

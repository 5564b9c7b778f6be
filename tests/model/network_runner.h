// A network on the CPU backend with a cache of its own, stepped by hand: what the model's tests
// share. The cache starts full of NaN bytes, so that reading what nobody wrote shows.

#ifndef TESTS_MODEL_NETWORK_RUNNER_H_
#define TESTS_MODEL_NETWORK_RUNNER_H_

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/plan_builder.h"
#include "kernels/cpu/cpu_backend.h"
#include "model/network.h"
#include "model/safetensors.h"
#include "status/check.h"

namespace model {

inline std::string GoldenModel(const std::string& name) {
  const char* dir = std::getenv("FERRY_GOLDEN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_GOLDEN_DIR is not set";
  return std::string(dir) + "/models/" + name;
}

// One case of a golden file.
struct GoldenCase {
  std::string name;
  std::vector<int32_t> ids;
  absl::Span<const float> logits;  // [min(ids, 64), vocab], of the last positions
  absl::Span<const int64_t> greedy;
  absl::Span<const float> margin;
};

inline std::vector<GoldenCase> GoldenCases(const Checkpoint& golden) {
  std::vector<GoldenCase> cases;
  const auto floats = [&](const std::string& name) {
    const TensorView& tensor = **golden.Get(name);
    return absl::Span<const float>(reinterpret_cast<const float*>(tensor.data.data()),
                                   tensor.data.size() / sizeof(float));
  };
  const auto integers = [&](const std::string& name) {
    const TensorView& tensor = **golden.Get(name);
    return absl::Span<const int64_t>(reinterpret_cast<const int64_t*>(tensor.data.data()),
                                     tensor.data.size() / sizeof(int64_t));
  };
  for (const auto& [name, tensor] : golden.tensors()) {
    if (name.size() < 4 || name.substr(name.size() - 4) != ".ids") continue;
    const std::string prefix = name.substr(0, name.size() - 3);
    const absl::Span<const int64_t> ids = integers(name);
    cases.push_back({.name = name.substr(0, name.size() - 4),
                     .ids = {ids.begin(), ids.end()},
                     .logits = floats(prefix + "logits"),
                     .greedy = integers(prefix + "greedy"),
                     .margin = floats(prefix + "margin")});
  }
  return cases;
}

class NetworkRunner {
 public:
  static constexpr int32_t kBlockSize = 64;
  static constexpr int32_t kNumBlocks = 64;

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
      : options_(options), backend_(kernels::cpu::CreateCpuBackend(num_threads)) {
    absl::StatusOr<std::unique_ptr<Network>> network = LoadNetwork(model_dir, options, *backend_);
    FERRY_CHECK(network.ok()) << network.status().ToString();
    network_ = std::move(*network);
    cache_.resize(kNumBlocks * network_->cache_layout().block_bytes());
    Reset();
    logits_ = *backend_->Allocate(int64_t{options.limits.max_logit_rows} *
                                  network_->config().vocab_size * sizeof(float));
    results_.resize(options.limits.max_samples);
    sampled_.resize(options.limits.max_samples);
  }

  const Network& network() const { return *network_; }
  int32_t vocab_size() const { return network_->config().vocab_size; }

  // Forgets everything: blocks are free, the cache is NaN.
  void Reset() {
    std::memset(cache_.data(), 0xff, cache_.size());
    pool_ = std::make_unique<engine::BlockPool>(kNumBlocks);
  }

  engine::Sequence NewSequence(absl::Span<const int32_t> tokens) const {
    engine::Sequence seq;
    seq.tokens.assign(tokens.begin(), tokens.end());
    seq.num_prompt_tokens = static_cast<int32_t>(tokens.size());
    return seq;
  }

  // One step.  Returns the logits of every row, [rows, vocab].
  std::vector<float> Step(absl::Span<const Part> parts) {
    StepPlan plan(options_.limits);
    engine::PlanBuilder builder(kBlockSize, plan);
    builder.Begin(++step_id_);
    for (const Part& part : parts) {
      const absl::Status grown = engine::GrowBlocks(
          *part.seq, part.seq->num_computed + part.num_tokens, kBlockSize, *pool_);
      FERRY_CHECK(grown.ok()) << grown.ToString();
      builder.Add(*part.seq, part.num_tokens, part.absorbed, /*sample=*/false, /*logits=*/true);
    }
    const absl::Status status = network_->Forward(
        {}, plan, {.cache = cache_.data()},
        {.results = results_.data(), .sampled_ids = sampled_.data(), .logits = logits_->floats()});
    FERRY_CHECK(status.ok()) << status.ToString();
    const float* logits = logits_->floats();
    return std::vector<float>(logits, logits + int64_t{plan.counts().num_tokens} * vocab_size());
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

  // The stored entries of a sequence, all groups and layers, in position order.
  // REQUIRES: every token has an entry.
  std::string CacheBytes(const engine::Sequence& seq) const {
    const CacheLayout& layout = network_->cache_layout();
    std::string bytes;
    const auto append = [&](const std::byte* from, int64_t count) {
      bytes.append(reinterpret_cast<const char*>(from), static_cast<size_t>(count));
    };
    for (size_t i = 0; i < layout.spec().groups.size(); ++i) {
      const CacheGroup& group = layout.spec().groups[i];
      // Index keys in fp8: of a block all values come first, then all scales.
      const bool apart = group.format == kernels::KvFormat::kFp8IndexKey;
      const int64_t values = apart ? network_->config().index_head_dim : group.entry_bytes;
      const int64_t scales = group.entry_bytes - values;
      for (int32_t layer = 0; layer < group.layers; ++layer) {
        for (int32_t position = 0; position < seq.num_computed; ++position) {
          const std::byte* block = cache_.data() +
                                   seq.blocks[position / kBlockSize] * layout.block_bytes() +
                                   layout.offset(static_cast<int32_t>(i), layer);
          append(block + position % kBlockSize * values, values);
          append(block + kBlockSize * values + position % kBlockSize * scales, scales);
        }
      }
    }
    return bytes;
  }

  engine::BlockPool& pool() { return *pool_; }

 private:
  const NetworkOptions options_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Network> network_;
  std::vector<std::byte> cache_;
  std::unique_ptr<engine::BlockPool> pool_;
  std::unique_ptr<kernels::Buffer> logits_;
  std::vector<kernels::SampleResult> results_;
  std::vector<int32_t> sampled_;
  int64_t step_id_ = 0;
};

}  // namespace model

#endif  // TESTS_MODEL_NETWORK_RUNNER_H_

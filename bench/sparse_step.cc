// sparse_step: what a decode step of V3.2 costs at a long context, against one of V3.
//
// Both are networks of two layers in V3's shapes (128 heads, latent 512 + 64, dense MLP of 18432;
// V3.2 with 64 index heads of 128 and the best 2048 keys), fp8 weights as published, made of random
// bytes in --dir and removed again.  The cache is filled with random numbers; each step decodes one
// token of one sequence.  Steps of the two alternate, so that a busy machine troubles both alike.
//
// Prints medians of the wall clock and of this process's CPU time, at --context and at a short one.

#include <time.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/plan_builder.h"
#include "kernels/cpu/cpu_backend.h"
#include "model/network.h"

namespace {

constexpr int64_t kHidden = 7168, kHeads = 128, kRank = 512, kQueryRank = 1536, kMlp = 18432;
constexpr int64_t kIndexHeads = 64, kIndexDim = 128, kTopK = 2048, kVocab = 256;
constexpr int32_t kLayers = 2, kBlockSize = 64;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "sparse_step: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Writes a safetensors file of random numbers.
class CheckpointWriter {
 public:
  void Matrix(const std::string& name, int64_t rows, int64_t cols) {
    Add(name + ".weight", "F8_E4M3", {rows, cols}, rows * cols);
    Add(name + ".weight_scale_inv", "F32", {(rows + 127) / 128, (cols + 127) / 128},
        (rows + 127) / 128 * ((cols + 127) / 128) * 4);
  }
  void Plain(const std::string& name, const std::vector<int64_t>& shape) {
    int64_t bytes = 2;
    for (const int64_t size : shape) bytes *= size;
    Add(name, "BF16", shape, bytes);
  }

  void Write(const std::string& path) const {
    std::string header = "{";
    int64_t offset = 0;
    for (const Tensor& tensor : tensors_) {
      std::string shape;
      for (const int64_t size : tensor.shape)
        absl::StrAppend(&shape, shape.empty() ? "" : ",", size);
      absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", tensor.name, "\":{\"dtype\":\"",
                      tensor.dtype, "\",\"shape\":[", shape, "],\"data_offsets\":[", offset, ",",
                      offset + tensor.bytes, "]}");
      offset += tensor.bytes;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << header;
    std::mt19937_64 random(1);
    std::vector<uint64_t> words;
    for (const Tensor& tensor : tensors_) {
      words.resize(static_cast<size_t>(tensor.bytes + 7) / 8);
      for (uint64_t& word : words) {
        if (tensor.dtype == "F8_E4M3") {
          word = random() & 0xb7b7b7b7b7b7b7b7;  // magnitudes up to 1, no NaN
        } else if (tensor.dtype == "BF16") {
          word = (random() & 0x807f807f807f807f) | 0x3f003f003f003f00;  // 1/2 to 1
        } else {
          word = std::bit_cast<uint32_t>(0x1p-5f) * 0x100000001u;
        }
      }
      out.write(reinterpret_cast<const char*>(words.data()), tensor.bytes);
    }
    if (!out) Check(absl::ResourceExhaustedError(absl::StrCat("cannot write ", path)));
  }

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    int64_t bytes;
  };
  void Add(std::string name, std::string dtype, std::vector<int64_t> shape, int64_t bytes) {
    tensors_.push_back({std::move(name), std::move(dtype), std::move(shape), bytes});
  }
  std::vector<Tensor> tensors_;
};

// One file of weights; V3 leaves the indexer's tensors alone.
void WriteCheckpoints(const std::filesystem::path& dir, int32_t context) {
  CheckpointWriter writer;
  writer.Plain("model.embed_tokens.weight", {kVocab, kHidden});
  writer.Plain("lm_head.weight", {kVocab, kHidden});
  writer.Plain("model.norm.weight", {kHidden});
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const std::string attention = prefix + "self_attn.", indexer = attention + "indexer.";
    writer.Plain(prefix + "input_layernorm.weight", {kHidden});
    writer.Plain(prefix + "post_attention_layernorm.weight", {kHidden});
    writer.Matrix(attention + "q_a_proj", kQueryRank, kHidden);
    writer.Plain(attention + "q_a_layernorm.weight", {kQueryRank});
    writer.Matrix(attention + "q_b_proj", kHeads * 192, kQueryRank);
    writer.Matrix(attention + "kv_a_proj_with_mqa", kRank + 64, kHidden);
    writer.Plain(attention + "kv_a_layernorm.weight", {kRank});
    writer.Matrix(attention + "kv_b_proj", kHeads * 256, kRank);
    writer.Matrix(attention + "o_proj", kHidden, kHeads * 128);
    writer.Matrix(indexer + "wq_b", kIndexHeads * kIndexDim, kQueryRank);
    writer.Matrix(indexer + "wk", kIndexDim, kHidden);
    writer.Plain(indexer + "k_norm.weight", {kIndexDim});
    writer.Plain(indexer + "k_norm.bias", {kIndexDim});
    writer.Plain(indexer + "weights_proj.weight", {kIndexHeads, kHidden});
    writer.Matrix(prefix + "mlp.gate_proj", kMlp, kHidden);
    writer.Matrix(prefix + "mlp.up_proj", kMlp, kHidden);
    writer.Matrix(prefix + "mlp.down_proj", kHidden, kMlp);
  }
  writer.Write(dir / "weights");
  for (const char* type : {"deepseek_v3", "deepseek_v32"}) {
    const std::filesystem::path model = dir / type;
    std::filesystem::create_directories(model);
    std::filesystem::create_hard_link(dir / "weights", model / "model.safetensors");
    std::ofstream(model / "config.json") << absl::StrCat(
        "{\"model_type\":\"", type, "\",\"vocab_size\":", kVocab,
        ",\"num_hidden_layers\":", kLayers, ",\"first_k_dense_replace\":", kLayers,
        ",\"index_topk\":", kTopK, ",\"max_position_embeddings\":", context + kBlockSize,
        ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}");
  }
}

class Model {
 public:
  Model(const std::string& dir, int32_t context, model::KvCacheDtype dtype, int32_t threads)
      : backend_(kernels::cpu::CreateCpuBackend(threads)) {
    options_.kv_cache_dtype = dtype;
    options_.block_size = kBlockSize;
    options_.limits.max_tokens = 16;
    options_.limits.max_absorbed_tokens = 16;
    options_.limits.max_seqs = 4;
    options_.limits.max_samples = 4;
    options_.limits.max_logit_rows = 1;
    options_.limits.max_blocks_per_seq = context / kBlockSize + 1;
    auto network = model::LoadNetwork(dir, options_, *backend_);
    Check(network.status());
    network_ = std::move(*network);
    const model::CacheLayout& layout = network_->cache_layout();
    // Entries as the network stores them itself: rows of normal numbers through StoreKv.
    cache_.resize(layout.block_bytes() * (options_.limits.max_blocks_per_seq + 1));
    Fill(layout);
    for (int32_t i = 1; i <= options_.limits.max_blocks_per_seq; ++i) blocks_.push_back(i);
    logits_.resize(kVocab);
    plan_ = std::make_unique<model::StepPlan>(options_.limits);
  }

  // Wall and CPU seconds of decoding the token at `position`.
  std::pair<double, double> Step(int32_t position) {
    engine::Sequence seq;
    seq.tokens.assign(position + 1, 7);
    seq.num_computed = position;
    seq.blocks = blocks_;
    engine::PlanBuilder builder(kBlockSize, *plan_);
    builder.Begin(1);
    builder.Add(seq, 1, /*absorbed=*/true, /*sample=*/false, /*logits=*/true);
    const double cpu = CpuSeconds();
    const auto start = std::chrono::steady_clock::now();
    Check(
        network_->Forward({}, *plan_, {.cache = cache_.data()},
                          {.results = nullptr, .sampled_ids = nullptr, .logits = logits_.data()}));
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
    return {wall.count(), CpuSeconds() - cpu};
  }

 private:
  void Fill(const model::CacheLayout& layout) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> row(kRank + 64 + kIndexDim);
    std::vector<float> ones(kRank, 1.0f), zeros(kIndexDim, 0.0f);
    const int32_t positions[] = {0};
    for (int64_t slot = kBlockSize; slot < kBlockSize * (options_.limits.max_blocks_per_seq + 1);
         ++slot) {
      for (float& value : row) value = normal(random);
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        kernels::StoreKvParams store;
        store.num_rows = 1;
        store.kv_a = row.data();
        store.kv_lora_rank = kRank;
        store.norm_weight = ones.data();
        store.rope = {ones.data(), zeros.data(), 64, 1, kernels::RopeLayout::kInterleaved};
        store.positions = positions;
        store.slots = &slot;
        store.pages = layout.Pages(cache_.data(), 0, layer);
        if (layout.spec().groups.size() > 1) {
          store.index_key.dim = kIndexDim;
          store.index_key.key = row.data() + kRank + 64;
          store.index_key.norm_weight = ones.data();
          store.index_key.norm_bias = zeros.data();
          store.index_key.pages = layout.Pages(cache_.data(), 1, layer);
        }
        Check(backend_->StoreKv({}, store));
      }
    }
  }

  std::unique_ptr<kernels::Backend> backend_;
  model::NetworkOptions options_;
  std::unique_ptr<model::Network> network_;
  std::vector<std::byte> cache_;
  std::vector<engine::BlockId> blocks_;
  std::vector<float> logits_;
  std::unique_ptr<model::StepPlan> plan_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What a decode step of V3.2 costs at a long context, against one of V3");
  int32_t context = 16384, steps = 9, threads = 1;
  std::string dtype = "float32";
  std::filesystem::path dir = std::filesystem::temp_directory_path() / "sparse_step";
  app.add_option("--context", context, "tokens")->capture_default_str();
  app.add_option("--steps", steps, "of each model")->capture_default_str();
  app.add_option("--threads", threads, "CPU threads")->capture_default_str();
  app.add_option("--kv_cache_dtype", dtype, "float32, bfloat16 or fp8")->capture_default_str();
  app.add_option("--dir", dir, "for 1.2 GB of weights")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  model::KvCacheDtype cache = model::KvCacheDtype::kFloat32;
  for (const auto one : {model::KvCacheDtype::kBfloat16, model::KvCacheDtype::kFp8}) {
    if (dtype == model::KvCacheDtypeName(one)) cache = one;
  }

  std::filesystem::create_directories(dir);
  WriteCheckpoints(dir, context);
  {
    Model dense(dir / "deepseek_v3", context, cache, threads);
    Model sparse(dir / "deepseek_v32", context, cache, threads);
    for (const int32_t length : {64, context}) {
      std::vector<double> wall[2], cpu[2];
      for (int32_t i = -1; i < steps; ++i) {
        for (int which = 0; which < 2; ++which) {
          const auto [w, c] = (which == 0 ? dense : sparse).Step(length - 1);
          if (i < 0) continue;  // the first is warm-up
          wall[which].push_back(w);
          cpu[which].push_back(c);
        }
      }
      std::printf(
          "%6d tokens, %s cache, %d threads: V3 %8.1f ms (CPU %8.1f), V3.2 %8.1f ms (CPU %8.1f), "
          "ratio of CPU times %.3f\n",
          length, std::string(model::KvCacheDtypeName(cache)).c_str(), threads,
          Median(wall[0]) * 1e3, Median(cpu[0]) * 1e3, Median(wall[1]) * 1e3, Median(cpu[1]) * 1e3,
          Median(cpu[1]) / Median(cpu[0]));
    }
  }
  std::filesystem::remove_all(dir);
}

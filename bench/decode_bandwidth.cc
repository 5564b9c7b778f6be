// decode_bandwidth: how much of the machine's memory bandwidth the CPU backend's matrix operations
// reach when they decode one sequence, and how much of its arithmetic when they prefill.
//
// The model is operations only: per layer q ‖ kv_a, W_UK, W_UV, o_proj and a mixture of experts in
// the shapes of DeepSeek-V2-Lite, then the head; random weights, far larger than the caches.  A
// step reads every weight it needs once.  The machine's bandwidth is that of plain reads by the
// same threads, measured between the steps; the ratio is that of the medians.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <time.h>

#include "CLI/CLI.hpp"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/moe.h"
#include "kernels/cpu/thread_pool.h"
#include "status/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using kernels::DType;
using kernels::WeightTensor;
using kernels::cpu::ThreadPool;

constexpr int64_t kHidden = 2048, kHeads = 16, kNope = 128, kRope = 64, kValue = 128, kRank = 512;
constexpr int64_t kExperts = 64, kTopK = 6, kIntermediate = 1408, kSharedIntermediate = 2816;
constexpr int64_t kVocab = 102400;
constexpr int64_t kQuery = kHeads * (kNope + kRope), kLatent = kRank + kRope;

double Seconds(const std::chrono::steady_clock::time_point& from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

// Of all threads of this process.  On a shared machine arithmetic is judged by it, not by the
// clock.
double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Source tensors may share memory: packing copies them.
class RandomWeights {
 public:
  explicit RandomWeights(DType dtype) : dtype_(dtype) {
    constexpr size_t kLargest = static_cast<size_t>(kVocab * kHidden);
    std::mt19937_64 random(1);
    values_.resize(kLargest * 2 / 8);
    for (uint64_t& word : values_) {
      // bf16 of magnitude 2^-6 to 2^-5, or e4m3 without NaN.
      const uint64_t bits = random();
      word = dtype == DType::kBfloat16 ? ((bits & 0x807f807f807f807f) | 0x3c803c803c803c80)
                                       : (bits & 0xbfbfbfbfbfbfbfbf);
    }
    scales_.assign(kLargest / 128 / 128 + 65536, 0.02f);
  }

  WeightTensor Tensor(int64_t rows, int64_t cols) const {
    WeightTensor tensor = {.data = values_.data(), .dtype = dtype_, .rows = rows, .cols = cols};
    if (dtype_ == DType::kFloat8E4m3) tensor.scales = scales_.data();
    return tensor;
  }
  // As stored in the checkpoint; the gate of V2-Lite is in it once as well.
  int64_t Bytes(int64_t rows, int64_t cols) const {
    return dtype_ == DType::kBfloat16 ? rows * cols * 2 : rows * cols;
  }

 private:
  DType dtype_;
  std::vector<uint64_t> values_;
  std::vector<float> scales_;
};

struct Layer {
  std::unique_ptr<kernels::PackedLinear> query_latent, output, gate;
  std::unique_ptr<kernels::PackedHeadLinear> w_uk, w_uv;
  std::unique_ptr<kernels::PackedExperts> experts;
};

class Model {
 public:
  Model(ThreadPool& pool, const RandomWeights& weights, int32_t num_layers, int32_t max_rows)
      : pool_(pool), norm_(kHidden, 1.0f) {
    for (int32_t i = 0; i < num_layers; ++i) {
      Layer layer;
      layer.query_latent = kernels::cpu::PackLinear(pool, {weights.Tensor(kQuery, kHidden),
                                                           weights.Tensor(kLatent, kHidden)})
                               .value();
      layer.output =
          kernels::cpu::PackLinear(pool, {weights.Tensor(kHidden, kHeads * kValue)}).value();
      layer.gate = kernels::cpu::PackLinear(pool, {weights.Tensor(kExperts, kHidden)}).value();
      const WeightTensor kv_b = weights.Tensor(kHeads * (kNope + kValue), kRank);
      layer.w_uk = kernels::cpu::PackHeadLinear(
                       pool, kv_b, {static_cast<int32_t>(kHeads), kNope + kValue, 0, kNope, true})
                       .value();
      layer.w_uv =
          kernels::cpu::PackHeadLinear(
              pool, kv_b, {static_cast<int32_t>(kHeads), kNope + kValue, kNope, kValue, false})
              .value();
      const auto expert = [&](int64_t intermediate) {
        return kernels::ExpertTensors{weights.Tensor(intermediate, kHidden),
                                      weights.Tensor(intermediate, kHidden),
                                      weights.Tensor(kHidden, intermediate)};
      };
      layer.experts =
          kernels::cpu::PackExperts(
              pool, std::vector<kernels::ExpertTensors>(kExperts, expert(kIntermediate)),
              {expert(kSharedIntermediate)})
              .value();
      layers_.push_back(std::move(layer));
    }
    head_ = kernels::cpu::PackLinear(pool, {weights.Tensor(kVocab, kHidden)}).value();
    const auto floats = [&](int64_t columns) {
      return std::vector<float>(static_cast<size_t>(max_rows * columns));
    };
    hidden_ = floats(kHidden);
    query_ = floats(kQuery);
    latent_ = floats(kLatent);
    absorbed_ = floats(kHeads * kRank);
    value_ = floats(kHeads * kValue);
    logits_ = floats(kVocab);
    layer_bytes_ =
        weights.Bytes(kQuery + kLatent, kHidden) + weights.Bytes(kHidden, kHeads * kValue) +
        weights.Bytes(kHeads * (kNope + kValue), kRank) + weights.Bytes(kExperts, kHidden) +
        3 * weights.Bytes(kTopK * kIntermediate + kSharedIntermediate, kHidden);
    head_bytes_ = weights.Bytes(kVocab, kHidden);
  }

  // Weight bytes that a step over one row reads.
  int64_t StepBytes() const {
    return static_cast<int64_t>(layers_.size()) * layer_bytes_ + head_bytes_;
  }

  void RandomInput(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (float& value : hidden_) value = normal(random);
  }

  void QueryLatent(const Layer& layer, int32_t rows) {
    const kernels::OutputSegment segments[] = {{query_.data(), kQuery, kQuery},
                                               {latent_.data(), kLatent, kLatent}};
    Run(kernels::cpu::Linear(pool_, {.weight = layer.query_latent.get(),
                                     .num_rows = rows,
                                     .input = {.data = hidden_.data(), .row_stride = kHidden},
                                     .norm_weight = norm_.data(),
                                     .outputs = segments}));
  }

  void Absorb(const Layer& layer, int32_t rows) {
    Run(kernels::cpu::HeadLinear(pool_, {.weight = layer.w_uk.get(),
                                         .num_rows = rows,
                                         .input = query_.data(),
                                         .input_row_stride = kQuery,
                                         .input_head_stride = kNope + kRope,
                                         .output = absorbed_.data(),
                                         .output_row_stride = kHeads * kRank,
                                         .output_head_stride = kRank}));
    Run(kernels::cpu::HeadLinear(pool_, {.weight = layer.w_uv.get(),
                                         .num_rows = rows,
                                         .input = absorbed_.data(),
                                         .input_row_stride = kHeads * kRank,
                                         .input_head_stride = kRank,
                                         .output = value_.data(),
                                         .output_row_stride = kHeads * kValue,
                                         .output_head_stride = kValue}));
  }

  void Output(const Layer& layer, int32_t rows) {
    const kernels::OutputSegment segment = {hidden_.data(), kHidden, kHidden};
    Run(kernels::cpu::Linear(pool_,
                             {.weight = layer.output.get(),
                              .num_rows = rows,
                              .input = {.data = value_.data(), .row_stride = kHeads * kValue},
                              .epilogue = kernels::LinearEpilogue::kResidual,
                              .epilogue_residual = hidden_.data(),
                              .outputs = {&segment, 1}}));
  }

  void Moe(const Layer& layer, int32_t rows) {
    Run(kernels::cpu::Moe(pool_, {.num_rows = rows,
                                  .input = hidden_.data(),
                                  .input_row_stride = kHidden,
                                  .norm_weight = norm_.data(),
                                  .gate = {.num_experts = static_cast<int32_t>(kExperts),
                                           .top_k = static_cast<int32_t>(kTopK)},
                                  .gate_weight = layer.gate.get(),
                                  .experts = layer.experts.get(),
                                  .output = hidden_.data(),
                                  .output_row_stride = kHidden}));
  }

  void Head(int32_t rows) {
    const kernels::OutputSegment segment = {logits_.data(), kVocab, kVocab};
    Run(kernels::cpu::Linear(pool_, {.weight = head_.get(),
                                     .num_rows = rows,
                                     .input = {.data = hidden_.data(), .row_stride = kHidden},
                                     .norm_weight = norm_.data(),
                                     .outputs = {&segment, 1}}));
  }

  void Step(int32_t rows) {
    for (const Layer& layer : layers_) {
      QueryLatent(layer, rows);
      Absorb(layer, rows);
      Output(layer, rows);
      Moe(layer, rows);
    }
    Head(rows);
  }

  const Layer& layer(size_t i) const { return layers_[i]; }

 private:
  static void Run(const absl::Status& status) { FERRY_CHECK(status.ok()) << status; }

  ThreadPool& pool_;
  std::vector<float> norm_;
  std::vector<Layer> layers_;
  std::unique_ptr<kernels::PackedLinear> head_;
  std::vector<float> hidden_, query_, latent_, absorbed_, value_, logits_;
  int64_t layer_bytes_ = 0, head_bytes_ = 0;
};

// Reads a large block of memory with all threads.
class ReadStream {
 public:
  ReadStream() {
    words_ = static_cast<uint64_t*>(std::aligned_alloc(size_t{2} << 20, kBytes));
    FERRY_CHECK(words_ != nullptr);
    madvise(words_, kBytes, MADV_HUGEPAGE);
    std::memset(words_, 1, kBytes);
  }
  ~ReadStream() { std::free(words_); }
  ReadStream(const ReadStream&) = delete;
  ReadStream& operator=(const ReadStream&) = delete;

  // Bytes a second.
  double Measure(ThreadPool& pool) {
    constexpr int64_t kChunk = int64_t{1} << 20;
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(kBytes / kChunk, [&](int64_t i) {
      const uint64_t* words = words_ + i * kChunk / 8;
      uint64_t sums[16] = {};
      for (int64_t w = 0; w < kChunk / 8; w += 16) {
        for (int lane = 0; lane < 16; ++lane) sums[lane] += words[w + lane];
      }
      uint64_t sum = 0;
      for (const uint64_t lane : sums) sum += lane;
      FERRY_CHECK(sum != 0);  // keeps the reads
    });
    return kBytes / Seconds(start);
  }

 private:
  static constexpr int64_t kBytes = int64_t{1} << 30;
  uint64_t* words_;
};

#if defined(__x86_64__)
// Floating-point operations a second of one core that does nothing but independent FMAs.
__attribute__((target("avx2,fma"))) double MeasureFmaPeak() {
  constexpr int kSums = 12;
  constexpr int64_t kRounds = 4'000'000;
  __m256 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  __m256 factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(0.001f);
  const double start = CpuSeconds();
  for (int64_t round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(sums[i], factor, term);
    asm volatile("" : "+x"(factor), "+x"(term));
  }
  const double seconds = CpuSeconds() - start;
  float total = 0;
  for (int i = 0; i < kSums; ++i) total += _mm256_cvtss_f32(sums[i]);
  FERRY_CHECK(total > 0);
  return kRounds * kSums * 16 / seconds;
}
#else
double MeasureFmaPeak() { return 0; }
#endif

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Bandwidth of decode and arithmetic of prefill of the CPU backend's matrix operations");
  int32_t num_threads = 2, num_layers = 4, repeats = 15, prefill_rows = 512;
  std::string dtype = "bf16";
  app.add_option("--threads", num_threads, "Threads")->check(CLI::Range(1, 1024));
  app.add_option("--layers", num_layers, "Layers")->check(CLI::Range(1, 64));
  app.add_option("--repeats", repeats, "Measured steps of each kind")->check(CLI::Range(1, 10000));
  app.add_option("--prefill_rows", prefill_rows, "Rows of a prefill step")
      ->check(CLI::Range(1, 4096));
  app.add_option("--dtype", dtype, "Weights")->check(CLI::IsMember({"bf16", "fp8"}));
  CLI11_PARSE(app, argc, argv);

  ThreadPool pool(num_threads);
  const RandomWeights weights(dtype == "bf16" ? DType::kBfloat16 : DType::kFloat8E4m3);
  Model model(pool, weights, num_layers, prefill_rows);
  ReadStream stream;
  std::mt19937 random(2);
  std::printf("%d threads, %d layers, %s weights, kernels %s\n", num_threads, num_layers,
              dtype.c_str(), kernels::cpu::BestMatrixKernels().name);

  std::vector<double> step_seconds, stream_rates;
  for (int32_t i = 0; i <= repeats; ++i) {
    model.RandomInput(random);  // other experts each time
    const double before = stream.Measure(pool);
    const auto start = std::chrono::steady_clock::now();
    model.Step(1);
    const double seconds = Seconds(start);
    if (i == 0) continue;  // touches the pages
    step_seconds.push_back(seconds);
    stream_rates.push_back(before);
  }
  const double rate = static_cast<double>(model.StepBytes()) / Median(step_seconds);
  std::printf(
      "decode, 1 row: %.1f MB read a step, %.2f ms (best %.2f), %.2f GB/s; read stream %.2f GB/s; "
      "ratio %.1f %%\n",
      static_cast<double>(model.StepBytes()) / 1e6, Median(step_seconds) * 1e3,
      *std::min_element(step_seconds.begin(), step_seconds.end()) * 1e3, rate / 1e9,
      Median(stream_rates) / 1e9, 100 * rate / Median(stream_rates));

  // One layer's operations by themselves: weights' bytes (decode) or operations (prefill) a second.
  const auto measure = [&](const char* name, double bytes, double flops_per_row, auto run) {
    std::vector<double> decode, prefill, prefill_cpu, peaks;
    size_t layer = 0;
    for (int32_t i = 0; i <= repeats; ++i) {
      model.RandomInput(random);
      layer = (layer + 1) % static_cast<size_t>(num_layers);
      auto start = std::chrono::steady_clock::now();
      run(model.layer(layer), 1);
      const double decode_seconds = Seconds(start);
      if (i > 0) decode.push_back(decode_seconds);
      if (i % 4 != 0 && i != 1) continue;
      peaks.push_back(MeasureFmaPeak());
      start = std::chrono::steady_clock::now();
      const double cpu_start = CpuSeconds();
      run(model.layer(layer), prefill_rows);
      prefill.push_back(Seconds(start));
      prefill_cpu.push_back(CpuSeconds() - cpu_start);
    }
    const double flops = flops_per_row * prefill_rows;
    std::printf(
        "%-7s 1 row %7.3f ms %6.2f GB/s   %d rows %8.2f ms %6.1f GFLOP/s, for each CPU "
        "second %5.1f GFLOP, %.1f %% of FMA peak %.1f\n",
        name, Median(decode) * 1e3, bytes / Median(decode) / 1e9, prefill_rows,
        Median(prefill) * 1e3, flops / Median(prefill) / 1e9, flops / Median(prefill_cpu) / 1e9,
        100 * flops / Median(prefill_cpu) / Median(peaks), Median(peaks) / 1e9);
  };
  const auto bytes = [&](int64_t rows, int64_t cols) {
    return static_cast<double>(weights.Bytes(rows, cols));
  };
  measure("q_kv_a", bytes(kQuery + kLatent, kHidden), 2.0 * (kQuery + kLatent) * kHidden,
          [&](const Layer& layer, int32_t rows) { model.QueryLatent(layer, rows); });
  measure("heads", bytes(kHeads * (kNope + kValue), kRank), 2.0 * kHeads * (kNope + kValue) * kRank,
          [&](const Layer& layer, int32_t rows) { model.Absorb(layer, rows); });
  measure("o_proj", bytes(kHidden, kHeads * kValue), 2.0 * kHidden * kHeads * kValue,
          [&](const Layer& layer, int32_t rows) { model.Output(layer, rows); });
  const int64_t moe_rows = 3 * (kTopK * kIntermediate + kSharedIntermediate) + kExperts;
  measure("moe", bytes(moe_rows, kHidden), 2.0 * static_cast<double>(moe_rows * kHidden),
          [&](const Layer& layer, int32_t rows) { model.Moe(layer, rows); });
  return 0;
}

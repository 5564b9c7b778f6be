#include "bench/kernel_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include "kernels/cuda/cuda_backend.h"
#include "nlohmann/json.hpp"

namespace bench {
namespace {

// Measured on an H200: a copy of 4 GiB, bf16 products sustained.
constexpr double kBytesPerUs = 4.283e6;
constexpr double kFlopsPerUs = 690e6;
constexpr int64_t kPoolValues = int64_t{1} << 28;
constexpr int64_t kFloatsDrawn = (int64_t{1} << 20) + 8;  // then they repeat
constexpr int32_t kReplays = 21;
// To start a graph takes 6 us, which is no kernel's time: a graph has this many launches of a
// kernel that takes less than kLongUs.
constexpr int32_t kLeastLaunches = 16;
constexpr double kLongUs = 500;

template <typename T>
T Check(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "cuda_kernels: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);
}
void Check(const absl::Status& status) { Check(status.ok() ? absl::StatusOr<int>(0) : status); }
void Check(cudaError_t error) {
  if (error != cudaSuccess) Check(absl::InternalError(cudaGetErrorString(error)));
}

// Normal values of 1 / 45 (about 1 / sqrt(2048)), so that products stay near 1.
std::vector<uint16_t> MakePool() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1.0f / 45);
  std::vector<uint16_t> pool(kPoolValues);
  constexpr int64_t kDrawn = int64_t{1} << 20;
  for (int64_t i = 0; i < kDrawn; ++i) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    pool[i] = static_cast<uint16_t>(bits >> 16);
  }
  for (int64_t i = kDrawn; i < kPoolValues; i += 4096) {
    const int64_t from = static_cast<int64_t>(random() % (kDrawn - 4096));
    std::copy_n(pool.begin() + from, 4096, pool.begin() + i);
  }
  return pool;
}

}  // namespace

KernelBench::KernelBench(std::string filter)
    : filter_(std::move(filter)),
      backend_(Check(kernels::cuda::CreateCudaBackend({.bfloat16 = true}))),
      pool_(MakePool()) {
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

KernelBench::~KernelBench() { cudaStreamDestroy(stream_); }

std::byte* KernelBench::UploadBytes(absl::Span<const std::byte> bytes) {
  std::byte* device = Bytes(static_cast<int64_t>(bytes.size()));
  Check(backend_->CopyToDevice({}, device, bytes));
  return device;
}

float* KernelBench::Floats(int64_t count, float scale) {
  std::mt19937 random(static_cast<uint32_t>(buffers_.size()));
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(std::min(count, kFloatsDrawn));
  for (float& value : values) value = normal(random);
  auto* device = reinterpret_cast<float*>(Bytes(count * 4));
  for (int64_t i = 0; i < count; i += kFloatsDrawn) {
    const auto size = static_cast<size_t>(std::min(kFloatsDrawn, count - i));
    Check(backend_->CopyToDevice({}, reinterpret_cast<std::byte*>(device + i),
                                 {reinterpret_cast<const std::byte*>(values.data()), size * 4}));
  }
  return device;
}

uint16_t* KernelBench::Bfloat16s(int64_t count) {
  auto* device = reinterpret_cast<uint16_t*>(Bytes(count * 2));
  for (int64_t i = 0; i < count; i += kPoolValues) {
    const auto size = static_cast<size_t>(std::min(kPoolValues, count - i));
    Check(backend_->CopyToDevice({}, reinterpret_cast<std::byte*>(device + i),
                                 {reinterpret_cast<const std::byte*>(pool_.data()), size * 2}));
  }
  return device;
}

std::byte* KernelBench::Bytes(int64_t count) {
  buffers_.push_back(Check(backend_->Allocate(count)));
  return buffers_.back()->data();
}

int64_t KernelBench::Take(int64_t count) {
  if (next_ + count > kPoolValues) next_ = next_ % 4096 / 16 * 16 + 16;
  const int64_t begin = next_;
  next_ += count;
  return begin;
}

kernels::WeightTensor KernelBench::Weight(int64_t rows, int64_t cols) {
  return {.data = pool_.data() + Take(rows * cols), .rows = rows, .cols = cols};
}

void KernelBench::MakeCodes() {
  if (!codes_.empty()) return;
  codes_.resize(kPoolValues);
  std::mt19937 random(2);
  for (int64_t i = 0; i < kPoolValues; i += 4) {
    const uint32_t bits = random() & 0xbfbfbfbf;
    std::memcpy(&codes_[i], &bits, sizeof(bits));
  }
  float_scales_.resize(kPoolValues / (128 * 64));
  for (float& scale : float_scales_) scale = std::ldexp(1.0f + (random() % 256) / 256.0f, -6);
  exponent_scales_.resize(kPoolValues / 16);
  for (uint8_t& scale : exponent_scales_) scale = static_cast<uint8_t>(120 + random() % 3);
}

kernels::WeightTensor KernelBench::Float8Weight(int64_t rows, int64_t cols,
                                                kernels::DType scale_dtype) {
  MakeCodes();
  return {.data = codes_.data() + Take(rows * cols),
          .dtype = kernels::DType::kFloat8E4m3,
          .rows = rows,
          .cols = cols,
          .scales = scale_dtype == kernels::DType::kFloat32
                        ? static_cast<const void*>(float_scales_.data())
                        : exponent_scales_.data(),
          .scale_dtype = scale_dtype};
}

kernels::WeightTensor KernelBench::Float4Weight(int64_t rows, int64_t cols) {
  MakeCodes();
  return {.data = codes_.data() + Take(rows * cols / 2),
          .dtype = kernels::DType::kFloat4E2m1,
          .rows = rows,
          .cols = cols,
          .scales = exponent_scales_.data(),
          .scale_dtype = kernels::DType::kFloat8E8m0,
          .scale_block_rows = 1,
          .scale_block_cols = 32};
}

void KernelBench::Group(const std::string& title) {
  std::printf("\n%s\n%-34s %9s %9s %9s %9s %8s %8s\n", title.c_str(), "case", "us", "floor", "bar",
              "peer", "GB/s", "TFLOP/s");
}

void KernelBench::Time(const Row& row, int32_t rotations, const Launch& launch) {
  const kernels::LaunchContext context{.stream = stream_};
  const double floor_us = std::max(row.bytes / kBytesPerUs, row.flops / kFlopsPerUs);
  const int32_t turns =
      floor_us < kLongUs ? (kLeastLaunches + rotations - 1) / rotations : 1;  // of all rotations
  Check(backend_->Synchronize({}));
  for (int32_t i = 0; i < rotations; ++i) Check(launch(context, i));
  Check(backend_->Synchronize(context));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (int32_t i = 0; i < turns * rotations; ++i) Check(launch(context, i % rotations));
  Check(cudaStreamEndCapture(stream_, &graph));
  Check(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int32_t i = 0; i < kReplays; ++i) {
    Check(cudaEventRecord(begin, stream_));
    Check(cudaGraphLaunch(replay, stream_));
    Check(cudaEventRecord(end, stream_));
    Check(cudaEventSynchronize(end));
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(1e3f * ms / static_cast<float>(turns * rotations));
  }
  Check(backend_->Synchronize(context));
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  const double us = times[kReplays / 2];
  std::printf("%-34s %9.2f %9.2f %9.2f %9.2f %8.0f %8.1f\n", row.name.c_str(), us, floor_us,
              row.bar_us, row.peer_us, row.bytes / us / 1e3, row.flops / us / 1e6);
  std::fflush(stdout);
  timed_.push_back({row, us, floor_us});
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

void KernelBench::WriteJson(const std::string& path) const {
  nlohmann::json rows = nlohmann::json::array();
  for (const TimedRow& timed : timed_) {
    rows.push_back({{"name", timed.row.name},
                    {"us", timed.us},
                    {"floor_us", timed.floor_us},
                    {"bar_us", timed.row.bar_us},
                    {"peer_us", timed.row.peer_us}});
  }
  std::ofstream file(path);
  file << rows.dump(1) << "\n";
  if (!file.flush()) Check(absl::InternalError("cannot write " + path));
}

}  // namespace bench

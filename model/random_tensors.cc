#include "model/random_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "status/check.h"
#include "xxhash.h"

namespace model {
namespace {

using kernels::DType;

constexpr uint32_t kBfloat16One = 0x3f80;
// Room for many different beginnings of a tensor of the largest size.
constexpr int64_t kSpare = int64_t{2} << 20;  // bytes
constexpr int64_t kAlignment = 128;           // of a beginning
constexpr int64_t kFp4ScaleColumns = 32;
constexpr uint32_t kFloat32Scale = 0x3c800000;  // 1/64
constexpr uint32_t kFloat8Scale = 127 - 6;      // e8m0: 1/64

// Random bits where `random` has ones, those of `fixed` elsewhere: numbers between 1/64 and 1/32,
// of the scaled formats between 1 and 2.
struct Pattern {
  uint64_t random;
  uint64_t fixed;
};

Pattern PatternOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {0x807fffff807fffffu, 0x3c8000003c800000u};
    case DType::kFloat8E4m3:
      return {0x8787878787878787u, 0x3838383838383838u};
    case DType::kFloat4E2m1:
      return {0x9999999999999999u, 0x2222222222222222u};
    default:
      return {0x807f807f807f807fu, 0x3c803c803c803c80u};
  }
}

const char* HeaderName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat8E4m3:
      return "F8_E4M3";
    case DType::kFloat8E8m0:
      return "F8_E8M0";
    case DType::kFloat4E2m1:
      return "I8";
    case DType::kInt32:
      return "I32";
    default:
      return "BF16";
  }
}

int64_t CeilDiv(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// splitmix64
uint64_t Mix(uint64_t i) {
  uint64_t x = i * 0x9e3779b97f4a7c15u + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of a tensor as stored: a packed fp4 one counts bytes.
int64_t SizeBytes(DType dtype, const std::vector<int64_t>& shape) {
  int64_t size = dtype == DType::kFloat4E2m1 ? 1 : kernels::DTypeBits(dtype) / 8;
  for (const int64_t dimension : shape) size *= dimension;
  return size;
}

const std::byte* Bytes(const std::vector<uint64_t>& words) {
  return reinterpret_cast<const std::byte*>(words.data());
}

}  // namespace

RandomTensors::RandomTensors(const ModelConfig& config)
    : is_v4_(config.family == ModelFamily::kDeepseekV4),
      is_quantised_(config.fp8_weights),
      block_rows_(config.weight_block_rows),
      block_cols_(config.weight_block_cols),
      num_experts_(config.gate.num_experts) {}

const TensorView* RandomTensors::Find(std::string_view name) const {
  const auto known = tensors_.find(name);
  return known == tensors_.end() ? nullptr : &known->second;
}

const TensorView* RandomTensors::Get(const std::string& name, const std::vector<int64_t>& shape) {
  if (const TensorView* known = Find(name)) return known;
  if (absl::EndsWith(name, "tid2eid") && shape.size() == 2) {
    return Add(name, DType::kInt32, shape, ExpertTable(shape[0], shape[1]));
  }
  const DType dtype = DType::kBfloat16;
  if (shape.size() > 1) {
    return Add(name, dtype, shape, RandomBytes(name, dtype, SizeBytes(dtype, shape)));
  }
  const bool ones = absl::StrContains(name, "norm") && !absl::EndsWith(name, "bias");
  return Add(name, dtype, shape, Constant(dtype, ones ? kBfloat16One : 0, shape.front()));
}

const TensorView* RandomTensors::GetMatrix(const std::string& name, int64_t rows, int64_t cols) {
  if (const TensorView* known = Find(name)) return known;
  const DType dtype = StoredAs(name);
  const std::vector<int64_t> shape = {rows, dtype == DType::kFloat4E2m1 ? CeilDiv(cols, 2) : cols};
  if (dtype == DType::kFloat8E4m3 || dtype == DType::kFloat4E2m1) {
    AddScales(name, dtype, rows, cols);
  }
  return Add(name, dtype, shape, RandomBytes(name, dtype, SizeBytes(dtype, shape)));
}

DType RandomTensors::StoredAs(const std::string& name) const {
  if (!is_quantised_) return DType::kBfloat16;
  if (!absl::EndsWith(name, ".weight")) return DType::kFloat32;
  if (is_v4_ && absl::StrContains(name, ".experts.")) return DType::kFloat4E2m1;
  const bool is_plain =
      absl::EndsWith(name, "gate.weight") || absl::EndsWith(name, "head.weight") ||
      absl::EndsWith(name, "weights_proj.weight") || absl::StrContains(name, "compressor.");
  return is_plain ? DType::kBfloat16 : DType::kFloat8E4m3;
}

void RandomTensors::AddScales(const std::string& name, DType dtype, int64_t rows, int64_t cols) {
  const bool is_fp4 = dtype == DType::kFloat4E2m1;
  const std::vector<int64_t> shape = {is_fp4 ? rows : CeilDiv(rows, block_rows_),
                                      CeilDiv(cols, is_fp4 ? kFp4ScaleColumns : block_cols_)};
  const DType scale_dtype = is_v4_ ? DType::kFloat8E8m0 : DType::kFloat32;
  const std::string scale_name =
      is_v4_ ? absl::StrCat(name.substr(0, name.size() - sizeof("weight") + 1), "scale")
             : absl::StrCat(name, "_scale_inv");
  Add(scale_name, scale_dtype, shape,
      Constant(scale_dtype, is_v4_ ? kFloat8Scale : kFloat32Scale, shape[0] * shape[1]));
}

const std::byte* RandomTensors::RandomBytes(const std::string& name, DType dtype,
                                            int64_t size_bytes) {
  std::map<int64_t, Words>& pools = pools_[dtype];
  if (pools.empty() || pools.rbegin()->first < size_bytes) {
    const Pattern pattern = PatternOf(dtype);
    Words words(static_cast<size_t>((size_bytes + kSpare) / 8));
    for (size_t i = 0; i < words.size(); ++i) words[i] = (Mix(i) & pattern.random) | pattern.fixed;
    pools.emplace(size_bytes, std::move(words));
  }
  const uint64_t hash = XXH3_64bits(name.data(), name.size());
  return Bytes(pools.rbegin()->second) + hash % (kSpare / kAlignment) * kAlignment;
}

const std::byte* RandomTensors::Constant(DType dtype, uint32_t value, int64_t count) {
  Words& words = constants_[{uint64_t{static_cast<uint8_t>(dtype)} << 32 | value, count}];
  if (!words.empty()) return Bytes(words);
  const size_t size = static_cast<size_t>(kernels::DTypeBits(dtype)) / 8;
  words.resize(static_cast<size_t>(count) * size / 8 + 1);
  auto* bytes = reinterpret_cast<std::byte*>(words.data());
  for (int64_t i = 0; i < count; ++i) std::memcpy(bytes + i * size, &value, size);
  return bytes;
}

const std::byte* RandomTensors::ExpertTable(int64_t rows, int64_t cols) {
  FERRY_CHECK(cols <= num_experts_) << cols << " different ones of " << num_experts_ << " experts";
  Words& words = expert_tables_[{rows, cols}];
  if (!words.empty()) return Bytes(words);
  words.resize(static_cast<size_t>(rows * cols) / 2 + 1);
  auto* experts = reinterpret_cast<int32_t*>(words.data());
  for (int64_t i = 0; i < rows * cols; ++i) {
    const uint64_t first =
        Mix(static_cast<uint64_t>(i / cols)) % static_cast<uint64_t>(num_experts_);
    experts[i] = static_cast<int32_t>((static_cast<int64_t>(first) + i % cols) % num_experts_);
  }
  return Bytes(words);
}

const TensorView* RandomTensors::Add(const std::string& name, DType dtype,
                                     const std::vector<int64_t>& shape, const std::byte* data) {
  TensorView view{.name = name,
                  .dtype = dtype,
                  .dtype_name = HeaderName(dtype),
                  .shape = shape,
                  .data = {data, static_cast<size_t>(SizeBytes(dtype, shape))},
                  .file = "random"};
  return &tensors_.emplace(name, std::move(view)).first->second;
}

}  // namespace model

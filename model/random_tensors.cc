#include "model/random_tensors.h"

#include <algorithm>
#include <utility>

#include "xxhash.h"

namespace model {
namespace {

constexpr uint16_t kOne = 0x3f80;
// Room for many different beginnings of a tensor of the largest size.
constexpr int64_t kSpare = int64_t{1} << 20;  // numbers
constexpr int64_t kAlignment = 64;            // of a beginning, in numbers

// splitmix64
uint64_t Mix(uint64_t i) {
  uint64_t x = i * 0x9e3779b97f4a7c15u + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

const RandomTensors::Numbers& RandomTensors::AtLeast(int64_t count) {
  if (!pools_.empty() && pools_.rbegin()->first >= count) return pools_.rbegin()->second;
  Numbers numbers(static_cast<size_t>(count + kSpare));
  for (size_t i = 0; i + 4 <= numbers.size(); i += 4) {
    // Random signs and fractions, the exponent of 1/64.
    const uint64_t word = (Mix(i) & 0x807f807f807f807fu) | 0x3c803c803c803c80u;
    for (size_t j = 0; j < 4; ++j) numbers[i + j] = static_cast<uint16_t>(word >> (16 * j));
  }
  return pools_.emplace(count, std::move(numbers)).first->second;
}

const TensorView* RandomTensors::Get(const std::string& name, const std::vector<int64_t>& shape) {
  if (const auto known = tensors_.find(name); known != tensors_.end()) return &known->second;
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const uint16_t* numbers;
  if (shape.size() == 1) {
    const bool ones = name.find("norm") != std::string::npos && !name.ends_with("bias");
    Numbers& vector = vectors_[{ones, count}];
    if (vector.empty()) vector.assign(static_cast<size_t>(count), ones ? kOne : uint16_t{0});
    numbers = vector.data();
  } else {
    const uint64_t hash = XXH3_64bits(name.data(), name.size());
    numbers = AtLeast(count).data() + hash % (kSpare / kAlignment) * kAlignment;
  }
  TensorView view{.name = name,
                  .dtype = kernels::DType::kBfloat16,
                  .dtype_name = "BF16",
                  .shape = shape,
                  .data = {reinterpret_cast<const std::byte*>(numbers),
                           static_cast<size_t>(count) * sizeof(uint16_t)},
                  .file = "random"};
  return &tensors_.emplace(name, std::move(view)).first->second;
}

}  // namespace model

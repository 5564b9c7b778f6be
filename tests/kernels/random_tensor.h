// Random tensors for tests of kernels: the same values for the same seed, on every machine.

#ifndef TESTS_KERNELS_RANDOM_TENSOR_H_
#define TESTS_KERNELS_RANDOM_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace kernels {

// Roughly unit normal: the sum of 12 uniform numbers (std::normal_distribution differs by library).
inline std::vector<float> RandomTensor(size_t size, uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::vector<float> values(size);
  for (float& value : values) {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(generator() >> 8) * 0x1p-24f;
    value = scale * sum;
  }
  return values;
}

}  // namespace kernels

#endif  // TESTS_KERNELS_RANDOM_TENSOR_H_

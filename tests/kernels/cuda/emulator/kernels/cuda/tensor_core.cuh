// kernels/cuda/tensor_core.cuh on the emulator: the same functions in plain C++.

#ifndef KERNELS_CUDA_TENSOR_CORE_CUH_
#define KERNELS_CUDA_TENSOR_CORE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace kernels::cuda {

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

namespace emulated {

inline float Low(uint32_t word) { return __uint_as_float(word << 16); }
inline float High(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

inline uint32_t RoundToBfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulated

inline void Mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  uint32_t words[6][32];
  for (int i = 0; i < 6; ++i) emulator::Share(mine[i], words[i]);
  const int32_t g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int32_t row_lane = g * 4, column_lane = (2 * t + i % 2) * 4;
    double sum = d[i];
    for (int32_t k = 0; k < 4; ++k) {
      for (int half = 0; half < 2; ++half) {
        const uint32_t a = words[(i < 2 ? 0 : 1) + 2 * half][row_lane + k];
        const uint32_t b = words[4 + half][column_lane + k];
        sum += static_cast<double>(emulated::Low(a)) * emulated::Low(b);
        sum += static_cast<double>(emulated::High(a)) * emulated::High(b);
      }
    }
    d[i] = static_cast<float>(sum);
  }
}

inline void LoadMatrices(uint32_t (&d)[4], const void* row) {
  const void* rows[32];
  emulator::Share(row, rows);
  const int32_t g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int32_t i = 0; i < 4; ++i) {
    std::memcpy(&d[i], static_cast<const std::byte*>(rows[8 * i + g]) + 4 * t, sizeof(d[i]));
  }
}

inline void LoadMatricesTransposed(uint32_t (&d)[4], const void* row) {
  const void* rows[32];
  emulator::Share(row, rows);
  const int32_t g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int32_t i = 0; i < 4; ++i) {
    const auto at = [&](int32_t r) {
      uint16_t value;
      std::memcpy(&value, static_cast<const std::byte*>(rows[8 * i + r]) + 2 * g, sizeof(value));
      return uint32_t{value};
    };
    d[i] = at(2 * t) | at(2 * t + 1) << 16;
  }
}

inline Words4 LoadStreaming(const void* from) {
  Words4 words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

inline void CopyAsync(void* shared, const void* from, bool valid) {
  if (valid) {
    std::memcpy(shared, from, 16);
  } else {
    std::memset(shared, 0, 16);
  }
}
inline void CommitCopies() {}
template <int kPending>
void WaitForCopies() {}

inline uint32_t PackBfloat16(float low, float high) {
  return emulated::RoundToBfloat16(low) | emulated::RoundToBfloat16(high) << 16;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TENSOR_CORE_CUH_

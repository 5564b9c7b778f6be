// A step of weights in any stored format (weight_format.h) times activations: what a lane holds of
// 16 weight rows are 16 bytes of row g and of row g + 8, from byte 16 t of the step's 64 on.
// Weights are widened to bf16 exactly; a scale multiplies the step's sums, or where there are
// several to a step, the weights.

#ifndef KERNELS_CUDA_WIDENED_STEP_CUH_
#define KERNELS_CUDA_WIDENED_STEP_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/float4_pair.cuh"
#include "kernels/cuda/float8_pair.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/weight_format.h"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {

// What a lane holds of 8 activation rows for one step: of row g as many values as of a weight row.
template <WeightFormat kFormat>
struct StepActivations {
  static constexpr int32_t kValues = StepDepthOf(kFormat) / 4;
  ActivationFragment parts[kValues / 8];

  // `row`: from the lane's first value of the step on.
  __device__ void Load(const uint16_t* row) {
#pragma unroll
    for (int32_t i = 0; i < kValues / 8; ++i) {
      parts[i] = reinterpret_cast<const ActivationFragment*>(row)[i];
    }
  }
};

// The scales of a step's 16 rows in shared memory: a word a row, one float32 or four e8m0 codes.
struct StepScales {
  uint32_t address;  // of row 0's

  __device__ static float LoadFloat(uint32_t from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
    return value;
  }
  __device__ static uint32_t LoadByte(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from));
    return value;
  }
};

// The weights of one step, bf16.
template <WeightFormat kFormat>
class WidenedStep;

template <>
class WidenedStep<WeightFormat::kBfloat16> {
 public:
  __device__ WidenedStep(const WeightFragment& stored, StepScales /*none*/) : weights_(stored) {}
  __device__ void Multiply(float (&sums)[4],
                           const StepActivations<WeightFormat::kBfloat16>& x) const {
    MultiplyStep(sums, weights_, x.parts[0]);
  }

 private:
  const WeightFragment weights_;
};

// Products that begin at zero, times a factor for row g and one for row g + 8, added to sums.
__device__ inline void AddScaled(float (&sums)[4], const float (&products)[4], float top,
                                 float bottom) {
  sums[0] = fmaf(top, products[0], sums[0]);
  sums[1] = fmaf(top, products[1], sums[1]);
  sums[2] = fmaf(bottom, products[2], sums[2]);
  sums[3] = fmaf(bottom, products[3], sums[3]);
}

template <>
class WidenedStep<WeightFormat::kFloat8> {
 public:
  __device__ WidenedStep(const WeightFragment& stored, StepScales scales) {
    constexpr uint32_t kUnspread = 0x7b807b80;  // 2^120 twice
    const int32_t g = static_cast<int32_t>(threadIdx.x) % kWarpSize / 4;
    top_scale_ = StepScales::LoadFloat(scales.address + 4 * g);
    bottom_scale_ = StepScales::LoadFloat(scales.address + 4 * (g + kStreamRows / 2));
    const auto widen = [](uint32_t(&to)[8], const Words4& codes) {
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const uint2 pairs = SpreadFloat8Apart(words[i]);
        to[2 * i] = MultiplyPair(pairs.x, kUnspread);
        to[2 * i + 1] = MultiplyPair(pairs.y, kUnspread);
      }
    };
    widen(top_, stored.top);
    widen(bottom_, stored.bottom);
  }
  __device__ void Multiply(float (&sums)[4],
                           const StepActivations<WeightFormat::kFloat8>& x) const {
    float products[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const ActivationFragment& part = x.parts[i];
      Mma(products, top_[4 * i], bottom_[4 * i], top_[4 * i + 1], bottom_[4 * i + 1], part.x,
          part.y);
      Mma(products, top_[4 * i + 2], bottom_[4 * i + 2], top_[4 * i + 3], bottom_[4 * i + 3],
          part.z, part.w);
    }
    AddScaled(sums, products, top_scale_, bottom_scale_);
  }

 private:
  uint32_t top_[8];
  uint32_t bottom_[8];
  float top_scale_;
  float bottom_scale_;
};

template <>
class WidenedStep<WeightFormat::kFloat4> {
 public:
  __device__ WidenedStep(const WeightFragment& stored, StepScales scales) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    const uint32_t mine = scales.address + 4 * (lane / 4) + lane % 4;  // of 32 values
    const auto widen = [](uint32_t(&to)[16], const Words4& codes, uint32_t scale) {
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        to[4 * i] = MultiplyPair(SpreadFloat4<0>(words[i]), scale);
        to[4 * i + 1] = MultiplyPair(SpreadFloat4<1>(words[i]), scale);
        to[4 * i + 2] = MultiplyPair(SpreadFloat4<2>(words[i]), scale);
        to[4 * i + 3] = MultiplyPair(SpreadFloat4<3>(words[i]), scale);
      }
    };
    widen(top_, stored.top, Float4ScalePair(StepScales::LoadByte(mine)));
    widen(bottom_, stored.bottom,
          Float4ScalePair(StepScales::LoadByte(mine + 4 * kStreamRows / 2)));
  }
  __device__ void Multiply(float (&sums)[4],
                           const StepActivations<WeightFormat::kFloat4>& x) const {
    constexpr float kUnscaled = 0x1p64f;
    static_assert(kFloat4Exponent == 64);
    float products[4] = {};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      // Activations in pairs as the weights: 0 and 4, 2 and 6, then 1 and 5, 3 and 7.
      const ActivationFragment& part = x.parts[i];
      Mma(products, top_[4 * i], bottom_[4 * i], top_[4 * i + 2], bottom_[4 * i + 2],
          __byte_perm(part.x, part.z, 0x5410), __byte_perm(part.x, part.z, 0x7632));
      Mma(products, top_[4 * i + 1], bottom_[4 * i + 1], top_[4 * i + 3], bottom_[4 * i + 3],
          __byte_perm(part.y, part.w, 0x5410), __byte_perm(part.y, part.w, 0x7632));
    }
    AddScaled(sums, products, kUnscaled, kUnscaled);
  }

 private:
  uint32_t top_[16];
  uint32_t bottom_[16];
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WIDENED_STEP_CUH_

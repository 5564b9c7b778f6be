// A cached key of sparse attention on its way from memory to a tensor core's operand: eight lanes
// have it in registers as it is stored, and give bf16 numbers.
//
// A key is boxes of 64 values, the rotary ones in the last; of every box a lane has 8 values.

#ifndef KERNELS_CUDA_SPARSE_KEY_CUH_
#define KERNELS_CUDA_SPARSE_KEY_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/float8_pair.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/tensor.h"

namespace kernels::cuda {

inline constexpr int32_t kKeyLanes = 8;

// A key's bytes.
struct KeyPlace {
  const std::byte* values;
  int32_t to_scales;  // bytes from there to the scales where they stand apart
};

inline constexpr uint32_t k2To120 = 0x7b807b80;  // a pair of bf16

// e4m3 values times a pair of equal bf16 numbers; `first` is 2^120 times what they are worth.
__device__ inline uint4 WidenFloat8(uint2 codes, uint32_t first) {
  const uint2 low = SpreadFloat8(codes.x), high = SpreadFloat8(codes.y);
  return {MultiplyPair(low.x, first), MultiplyPair(low.y, first), MultiplyPair(high.x, first),
          MultiplyPair(high.y, first)};
}
__device__ inline uint4 MultiplyUnit(uint4 unit, uint32_t pair) {
  return {MultiplyPair(unit.x, pair), MultiplyPair(unit.y, pair), MultiplyPair(unit.z, pair),
          MultiplyPair(unit.w, pair)};
}

// A key in registers: of every box this lane's 8 values.  Eight lanes have a key.
template <KvFormat kFormat, int32_t kBoxes>
struct LaneKey;

// fp8: boxes of codes, and the rotary values as they are.
template <int32_t kBoxes>
struct LaneCodes {
  static constexpr int32_t kCodes = (kBoxes - 1) * kBoxColumns;
  uint2 codes[kBoxes - 1];
  uint4 rope;

  __device__ void Load(const std::byte* values, const std::byte* rope_values, int32_t lane) {
#pragma unroll
    for (int32_t box = 0; box < kBoxes - 1; ++box) {
      codes[box] = __ldg(reinterpret_cast<const uint2*>(values + box * kBoxColumns) + lane);
    }
    rope = __ldg(reinterpret_cast<const uint4*>(rope_values) + lane);
  }
  // scale_of(box): a pair of bf16, or 2^120 times it.  A large scale takes two steps, each finite.
  template <typename ScaleOf, typename Put>
  __device__ void Widen(bool large, const ScaleOf& scale_of, const Put& put) const {
    if (large) {
#pragma unroll 1
      for (int32_t box = 0; box < kBoxes - 1; ++box) {
        uint2 of_box = codes[0];
#pragma unroll
        for (int32_t i = 1; i < kBoxes - 1; ++i) of_box = i == box ? codes[i] : of_box;
        put(box, MultiplyUnit(WidenFloat8(of_box, k2To120), scale_of(box, false)));
      }
    } else {
#pragma unroll
      for (int32_t box = 0; box < kBoxes - 1; ++box) {
        put(box, WidenFloat8(codes[box], scale_of(box, true)));
      }
    }
    put(kBoxes - 1, rope);
  }
};

template <int32_t kBoxes>
struct LaneKey<KvFormat::kFp8Latent, kBoxes> {
  LaneCodes<kBoxes> codes;
  float4 scales;  // one for two boxes

  __device__ void Load(const KeyPlace& place, int32_t lane) {
    const std::byte* behind = place.values + LaneCodes<kBoxes>::kCodes;
    codes.Load(place.values, behind + sizeof(float4), lane);
    scales = __ldg(reinterpret_cast<const float4*>(behind));
  }
  template <typename Put>
  __device__ void Widen(const Put& put) const {
    const bool large = fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w)) >= 64;
    codes.Widen(
        large,
        [&](int32_t box, bool raised) {
          const float scale = box < 2   ? scales.x
                              : box < 4 ? scales.y
                              : box < 6 ? scales.z
                                        : scales.w;
          const float factor = raised ? scale * 0x1p120f : scale;
          return PackBfloat16(factor, factor);
        },
        put);
  }
};

template <int32_t kBoxes>
struct LaneKey<KvFormat::kFp8SharedKv, kBoxes> {
  LaneCodes<kBoxes> codes;
  uint2 scales;  // a byte a box: 2^(byte - 127), the bits of a bf16's exponent

  __device__ void Load(const KeyPlace& place, int32_t lane) {
    codes.Load(place.values, place.values + LaneCodes<kBoxes>::kCodes, lane);
    scales = __ldg(reinterpret_cast<const uint2*>(place.values + place.to_scales));
  }
  template <typename Put>
  __device__ void Widen(const Put& put) const {
    constexpr uint32_t kLargest = 0x01010101u * (127 + 6);
    const bool large =
        __vmaxu4(scales.x, kLargest) != kLargest || __vmaxu4(scales.y, kLargest) != kLargest;
    codes.Widen(
        large,
        [&](int32_t box, bool raised) {
          const uint32_t scale = (box < 4 ? scales.x : scales.y) >> (8 * (box % 4)) & 0xff;
          return (scale + (raised ? 120 : 0)) * (0x00010001u << 7);
        },
        put);
  }
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_KEY_CUH_

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

// A key's bytes.
struct KeyPlace {
  const std::byte* values = nullptr;  // null: no key, zeros
  const std::byte* scales = nullptr;  // where they stand apart
};

// e4m3 values times a bf16 scale; both factors of a large scale are finite.
__device__ inline uint4 WidenFloat8(uint2 codes, uint32_t first, uint32_t second, bool has_second) {
  const uint2 low = SpreadFloat8(codes.x), high = SpreadFloat8(codes.y);
  uint4 unit = {MultiplyPair(low.x, first), MultiplyPair(low.y, first), MultiplyPair(high.x, first),
                MultiplyPair(high.y, first)};
  if (has_second) {
    unit = {MultiplyPair(unit.x, second), MultiplyPair(unit.y, second),
            MultiplyPair(unit.z, second), MultiplyPair(unit.w, second)};
  }
  return unit;
}
inline constexpr uint32_t k2To120 = 0x7b807b80;  // a pair of bf16

// A key in registers: of every box this lane's 8 values.  Eight lanes have a key.
template <KvFormat kFormat, int32_t kBoxes>
struct LaneKey {  // bf16
  uint4 units[kBoxes];

  __device__ void Load(const KeyPlace& place, int32_t lane) {
#pragma unroll
    for (int32_t box = 0; box < kBoxes; ++box) {
      units[box] = place.values == nullptr
                       ? make_uint4(0, 0, 0, 0)
                       : __ldg(reinterpret_cast<const uint4*>(place.values) + 8 * box + lane);
    }
  }
  __device__ uint4 Unit(int32_t box) const { return units[box]; }
};

template <int32_t kBoxes>
struct LaneKey<KvFormat::kFp8Latent, kBoxes> {
  uint2 codes[kBoxes - 1];
  float4 scales;
  uint4 rope;

  __device__ void Load(const KeyPlace& place, int32_t lane) {
    const std::byte* from = place.values;
#pragma unroll
    for (int32_t box = 0; box < kBoxes - 1; ++box) {
      codes[box] = from == nullptr
                       ? make_uint2(0, 0)
                       : __ldg(reinterpret_cast<const uint2*>(from + box * kBoxColumns) + lane);
    }
    constexpr int32_t kCodes = (kBoxes - 1) * kBoxColumns;
    scales = from == nullptr ? make_float4(0, 0, 0, 0)
                             : __ldg(reinterpret_cast<const float4*>(from + kCodes));
    rope = from == nullptr ? make_uint4(0, 0, 0, 0)
                           : __ldg(reinterpret_cast<const uint4*>(from + kCodes + 16) + lane);
  }
  __device__ uint4 Unit(int32_t box) const {
    if (box == kBoxes - 1) return rope;
    const float scale = box < 2 ? scales.x : box < 4 ? scales.y : box < 6 ? scales.z : scales.w;
    const bool large = scale >= 64;
    const float first = scale * 0x1p120f;
    return WidenFloat8(codes[box], large ? k2To120 : PackBfloat16(first, first),
                       PackBfloat16(scale, scale), large);
  }
};

template <int32_t kBoxes>
struct LaneKey<KvFormat::kFp8SharedKv, kBoxes> {
  uint2 codes[kBoxes - 1];
  uint2 scales;  // a byte a box
  uint4 rope;

  __device__ void Load(const KeyPlace& place, int32_t lane) {
    const std::byte* from = place.values;
#pragma unroll
    for (int32_t box = 0; box < kBoxes - 1; ++box) {
      codes[box] = from == nullptr
                       ? make_uint2(0, 0)
                       : __ldg(reinterpret_cast<const uint2*>(from + box * kBoxColumns) + lane);
    }
    constexpr int32_t kCodes = (kBoxes - 1) * kBoxColumns;
    scales =
        from == nullptr ? make_uint2(0, 0) : __ldg(reinterpret_cast<const uint2*>(place.scales));
    rope = from == nullptr ? make_uint4(0, 0, 0, 0)
                           : __ldg(reinterpret_cast<const uint4*>(from + kCodes) + lane);
  }
  __device__ uint4 Unit(int32_t box) const {
    if (box == kBoxes - 1) return rope;
    const uint32_t scale = (box < 4 ? scales.x : scales.y) >> (8 * (box % 4)) & 0xff;
    const bool large = scale > 127 + 6;
    // 2^(scale - 127) is a bf16's exponent.
    const uint32_t first = (scale + 120) << 7, second = scale << 7;
    return WidenFloat8(codes[box], large ? k2To120 : first << 16 | first, second << 16 | second,
                       large);
  }
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_KEY_CUH_

// Tiles of products with weights of fp8 or fp4 (quantized_products.h): 128 weight rows, of which a
// warpgroup multiplies 64, by up to 128 tokens.  One thread has the copy engine fill a ring of
// stages, 128 of the depth each, with weights as they are stored and tokens as bf16; the
// warpgroups load codes, widen them and multiply from registers.

#ifndef KERNELS_CUDA_QUANTIZED_TILE_CUH_
#define KERNELS_CUDA_QUANTIZED_TILE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/float4_pair.cuh"
#include "kernels/cuda/float8_pair.cuh"
#include "kernels/cuda/held_product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantized_products.h"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kQuantizedRows = 2 * kBoxRows;  // of a tile: a warpgroup 64
inline constexpr int32_t kQuantizedDepth = 128;
inline constexpr int32_t kDepthProducts = kQuantizedDepth / kProductDepth;
inline constexpr int32_t kMaxTileTokens = 128;
inline constexpr int32_t kMaxStages = 8;
inline constexpr int32_t kQuantizedWarps = 8;  // that multiply
inline constexpr int32_t kScaleBlock = 128;    // of fp8
inline constexpr int32_t kScaleGroup = 32;     // of fp4

// A row of a stage's weights.
constexpr int32_t RowBytesOf(WeightFormat format) {
  return format == WeightFormat::kFloat8 ? kQuantizedDepth : kQuantizedDepth / 2;
}

// The ring of stages: weights, then tokens in two boxes of 64 of the depth.
template <WeightFormat kFormat>
class QuantizedRing {
 public:
  static constexpr int32_t kWeightBytes = kQuantizedRows * RowBytesOf(kFormat);
  __host__ __device__ static constexpr int32_t StageBytes(int32_t tile_tokens) {
    return kWeightBytes + tile_tokens * kQuantizedDepth * static_cast<int32_t>(sizeof(uint16_t));
  }

  __device__ QuantizedRing(std::byte* begin, int32_t tile_tokens, int32_t num_stages)
      : begin_(begin), tile_tokens_(tile_tokens), num_stages_(num_stages) {}

  __device__ std::byte* weights() const { return begin_ + stage_ * StageBytes(tile_tokens_); }
  __device__ uint16_t* tokens(int32_t half) const {
    return reinterpret_cast<uint16_t*>(weights() + kWeightBytes) +
           half * tile_tokens_ * kBoxColumns;
  }
  // All of it.
  __device__ float* memory() const { return reinterpret_cast<float*>(begin_); }
  __device__ int32_t stage() const { return stage_; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void Advance() {
    if (++stage_ < num_stages_) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  std::byte* const begin_;
  const int32_t tile_tokens_;
  const int32_t num_stages_;
  int32_t stage_ = 0;
  uint32_t parity_ = 0;
};

struct QuantizedBarriers {
  Barrier full[kMaxStages];
  Barrier empty[kMaxStages];
};

// Rows of the tile's weights in shared memory that a warp multiplies: eight as a product's rows g,
// eight as its rows g + 8.  With SwiGLU these are gate rows and the up rows of the same columns.
struct WarpRows {
  int32_t top;
  int32_t bottom;
};
__device__ inline WarpRows RowsOfWarp(int32_t warp, bool swiglu) {
  if (swiglu) return {8 * warp, 8 * warp + kBoxRows};
  return {16 * warp, 16 * warp + 8};
}

// A thread's scales of row g and row g + 8, a stage at a time: the one of fp8, four codes of fp4.
template <WeightFormat kFormat>
class StageScales {
 public:
  // `top` and `bottom`: rows of the matrix; beyond its end the last one's scales are read.
  __device__ StageScales(const QuantizedProduct& product, const ExpertTile& tile, int64_t top,
                         int64_t bottom, bool is_second) {
    const QuantizedScales& first = tile.is_shared() ? product.shared_first : product.first;
    const QuantizedScales& second = tile.is_shared() ? product.shared_second : product.second;
    const int64_t last = ColumnsOf(product.tiles, tile) - 1;
    const int64_t depth = DepthOf(product.tiles, tile);
    const auto at = [&](const QuantizedScales& scales, int64_t row) {
      row = min(row, last);
      const std::byte* matrix = scales.data + max(tile.expert, 0) * scales.stack_stride;
      return reinterpret_cast<const uint32_t*>(
          kFormat == WeightFormat::kFloat8
              ? matrix + row / kScaleBlock * CeilDiv(depth, int64_t{kScaleBlock}) * 4
              : matrix + row * (depth / kScaleGroup));
    };
    top_ = at(first, top);
    bottom_ = at(is_second ? second : first, bottom);
    words_ = static_cast<int32_t>(kFormat == WeightFormat::kFloat8
                                      ? CeilDiv(depth, int64_t{kScaleBlock})
                                      : CeilDiv(depth, int64_t{kQuantizedDepth}));
    if constexpr (kFormat == WeightFormat::kFloat4) {
      groups_ = static_cast<int32_t>(depth / kScaleGroup);
    }
  }
  __device__ uint32_t Top(int32_t stage) const { return Load(top_, stage); }
  __device__ uint32_t Bottom(int32_t stage) const { return Load(bottom_, stage); }

 private:
  // Words of fp4's scales need not be aligned, and the last may not be whole.
  __device__ uint32_t Load(const uint32_t* row, int32_t stage) const {
    if (stage >= words_) return 0;
    if constexpr (kFormat == WeightFormat::kFloat8) return __ldg(row + stage);
    const auto* bytes = reinterpret_cast<const uint8_t*>(row) + 4 * stage;
    if (groups_ % 4 == 0) return __ldg(row + stage);
    uint32_t word = 0;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (4 * stage + i < groups_) word |= uint32_t{__ldg(bytes + i)} << (8 * i);
    }
    return word;
  }

  const uint32_t* top_;
  const uint32_t* bottom_;
  int32_t words_;
  int32_t groups_ = 0;
};

// The codes of one load (LoadMatrices): rows g and g + 8 of two neighbouring pieces of 16 bytes.
// `from` of lane l: row l % 8 of the top rows, or if l / 8 is odd of the bottom ones.
template <WeightFormat kFormat>
__device__ void LoadCodes(uint32_t (&codes)[4], const std::byte* from, int32_t row, int32_t piece) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  // The swizzle of rows of 128 and of 64 bytes.
  const int32_t turn = kFormat == WeightFormat::kFloat8 ? row % 8 : row / 2 % 4;
  LoadMatrices(codes, from + (((piece + lane / 16) ^ turn) * 16));
}

// Stages of a tile's depth.
struct StageRange {
  int32_t begin;
  int32_t end;
};

// Multiplies these stages of a tile's depth; sums[4 j + 2 i + c] is row i of the thread's two and
// token 8 j + 2 t + c.
template <WeightFormat kFormat, int32_t kTokens>
__device__ void MultiplyDepth(QuantizedRing<kFormat>& ring, QuantizedBarriers& barriers,
                              const WarpRows& rows, const StageScales<kFormat>& scales,
                              const StageRange& stages, float (&sums)[kTokens / 2]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t row = (lane / 8 % 2 == 0 ? rows.top : rows.bottom) + lane % 8;
  uint32_t next_top = scales.Top(stages.begin), next_bottom = scales.Bottom(stages.begin);
  for (int32_t s = stages.begin; s < stages.end; ++s) {
    const uint32_t top = next_top, bottom = next_bottom;
    next_top = scales.Top(s + 1);
    next_bottom = scales.Bottom(s + 1);
    WaitFor(&barriers.full[ring.stage()], ring.parity());
    const std::byte* from = ring.weights() + row * RowBytesOf(kFormat);
    uint32_t a[kDepthProducts][4];
    if constexpr (kFormat == WeightFormat::kFloat8) {
      constexpr uint32_t kUnspread = 0x7b807b80;  // 2^120 twice
#pragma unroll
      for (int32_t i = 0; i < kDepthProducts; i += 2) {
        uint32_t codes[4];
        LoadCodes<kFormat>(codes, from, row, i);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {  // of product i + j / 2, row g or g + 8
          const uint2 pairs = SpreadFloat8(codes[j]);
          a[i + j / 2][j % 2] = MultiplyPair(pairs.x, kUnspread);
          a[i + j / 2][j % 2 + 2] = MultiplyPair(pairs.y, kUnspread);
        }
      }
    } else {
#pragma unroll
      for (int32_t i = 0; i < 4; i += 2) {  // of scales
        uint32_t codes[4];
        LoadCodes<kFormat>(codes, from, row, i);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {
          const int32_t group = i + j / 2;
          const uint32_t scale = Float4ScalePair((j % 2 == 0 ? top : bottom) >> (8 * group) & 0xff);
          uint32_t(&first)[4] = a[2 * group];
          uint32_t(&second)[4] = a[2 * group + 1];
          first[j % 2] = MultiplyPair(SpreadFloat4<0>(codes[j]), scale);
          first[j % 2 + 2] = MultiplyPair(SpreadFloat4<1>(codes[j]), scale);
          second[j % 2] = MultiplyPair(SpreadFloat4<2>(codes[j]), scale);
          second[j % 2 + 2] = MultiplyPair(SpreadFloat4<3>(codes[j]), scale);
        }
      }
    }
    float products[kTokens / 2];
    const auto multiply = [&](float(&d)[kTokens / 2], bool add_first) {
      KeepSums(d);
      BeginProducts();
#pragma unroll
      for (int32_t i = 0; i < kDepthProducts; ++i) {
        MultiplyHeldRows(d, a[i], DescribeRows(ring.tokens(i / 4) + i % 4 * kProductDepth),
                         add_first || i > 0);
      }
      CommitProducts();
      KeepSums(d);
      WaitForProducts<0>();
      KeepSums(d);
      if (lane == 0) Arrive(&barriers.empty[ring.stage()]);
    };
    if constexpr (kFormat == WeightFormat::kFloat8) {
      multiply(products, false);
      const float scale[2] = {__uint_as_float(top), __uint_as_float(bottom)};
#pragma unroll
      for (int32_t i = 0; i < kTokens / 2; ++i) {
        sums[i] = fmaf(scale[i / 2 % 2], products[i], sums[i]);
      }
    } else {
      multiply(sums, true);
    }
    ring.Advance();
  }
  if constexpr (kFormat == WeightFormat::kFloat4) {
    static_assert(kFloat4Exponent == 64);
#pragma unroll
    for (int32_t i = 0; i < kTokens / 2; ++i) sums[i] *= 0x1p64f;
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_QUANTIZED_TILE_CUH_

// HeadLinear over bf16 weights as a block's work (weight_stream.cuh): a warp has 16 rows of a
// head's matrix and the whole depth; the activations lie in shared memory, rounded.

#ifndef KERNELS_CUDA_HEAD_STREAM_CUH_
#define KERNELS_CUDA_HEAD_STREAM_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/head_stream.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {

struct HeadStreamArgs {
  const uint16_t* weight = nullptr;  // [heads, columns, depth]
  int32_t num_heads = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  int32_t num_rows = 0;
  const float* input = nullptr;
  int64_t input_row_stride = 0;
  int64_t input_head_stride = 0;
  float* output = nullptr;
  uint16_t* rounded_output = nullptr;
  int64_t output_row_stride = 0;
  int64_t output_head_stride = 0;
};

// REQUIRES: CanStreamHeads; `weight` as StreamHeadLinear takes it.
HeadStreamArgs MakeHeadStreamArgs(const HeadLinearParams& params, const uint16_t* weight);

inline constexpr int32_t kHeadStreamColumns = kStreamWarps * kStreamRows;  // of a block
// Tiles of rows of a block, for few rows and for many.
inline constexpr int32_t kFewHeadStreamTiles = 1;
inline constexpr int32_t kManyHeadStreamTiles = 4;

inline constexpr int32_t kHeadStreamPadding = 32;  // of an activation row: rows in different banks

inline int32_t HeadStreamTiles(int32_t num_rows) {
  return num_rows <= kTokensPerTile ? kFewHeadStreamTiles : kManyHeadStreamTiles;
}
inline size_t HeadStreamSharedBytes(const HeadStreamArgs& args) {
  return sizeof(uint16_t) * static_cast<size_t>(HeadStreamTiles(args.num_rows) * kTokensPerTile *
                                                (args.depth + kHeadStreamPadding));
}
inline int32_t HeadStreamBlocks(const HeadStreamArgs& args) {
  return static_cast<int32_t>(CeilDiv(args.columns, int64_t{kHeadStreamColumns})) * args.num_heads *
         CeilDiv(args.num_rows, HeadStreamTiles(args.num_rows) * kTokensPerTile);
}

// A head's activations of kTiles tiles of rows from row_begin on, in bf16; zeros past the last row.
template <int32_t kTiles>
__device__ void RoundHeadRows(const HeadStreamArgs& args, int64_t head, int32_t row_begin,
                              uint16_t* rows) {
  const float* input = args.input + head * args.input_head_stride;
  const auto pieces = static_cast<int32_t>(args.depth / 4);
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < kTiles * kTokensPerTile * pieces; i += kStreamThreads) {
    const int32_t row = i / pieces, k = i % pieces * 4;
    float4 x = make_float4(0, 0, 0, 0);
    if (row_begin + row < args.num_rows) {
      x = *reinterpret_cast<const float4*>(input + (row_begin + row) * args.input_row_stride + k);
    }
    *reinterpret_cast<uint2*>(rows + row * (args.depth + kHeadStreamPadding) + k) =
        make_uint2(PackBfloat16(x.x, x.y), PackBfloat16(x.z, x.w));
  }
}

// The work of block `block` of HeadStreamBlocks, of kStreamThreads threads; waits for the kernel
// before.  Dynamic shared memory: HeadStreamSharedBytes.
template <int32_t kTiles>
__device__ void StreamHeadColumns(const HeadStreamArgs& args, int32_t block) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const auto column_blocks =
      static_cast<int32_t>(CeilDiv(args.columns, int64_t{kHeadStreamColumns}));
  const int64_t head = block / column_blocks % args.num_heads;
  const int32_t row_begin = block / column_blocks / args.num_heads * kTiles * kTokensPerTile;
  const int64_t first =
      int64_t{block % column_blocks} * kHeadStreamColumns + warp * kStreamRows + g;
  const int64_t second = first + kStreamRows / 2;
  // Columns past the end are read at the last one and not stored.
  const int64_t last = args.columns - 1;
  const uint16_t* weight = args.weight + head * args.columns * args.depth + 8 * t;
  auto* rows = reinterpret_cast<uint16_t*>(DynamicShared());
  const auto depth = static_cast<int32_t>(args.depth);
  const uint16_t* x = rows + g * (depth + kHeadStreamPadding) + 8 * t;
  const auto load_x = [&](int32_t tile, int32_t step) {
    return *reinterpret_cast<const ActivationFragment*>(
        x + tile * kTokensPerTile * (depth + kHeadStreamPadding) + step * kStepDepth);
  };
  const auto before_use = [&] {
    WaitForPrevious();
    RoundHeadRows<kTiles>(args, head, row_begin, rows);
    __syncthreads();
  };
  float sums[kTiles][4] = {};
  const StepRange steps{0, depth / kStepDepth};
  StreamRows<kTiles>(sums, weight + (first < last ? first : last) * args.depth,
                     weight + (second < last ? second : last) * args.depth, steps, load_x,
                     before_use);
  const auto store = [&](int32_t row, int64_t column, float value) {
    if (column >= args.columns) return;
    StoreElement(args.output, args.rounded_output,
                 row * args.output_row_stride + head * args.output_head_stride + column, value);
  };
  for (int32_t tile = 0; tile < kTiles; ++tile) {
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t row = row_begin + tile * kTokensPerTile + 2 * t + j;
      if (row >= args.num_rows) continue;
      store(row, first, sums[tile][j]);
      store(row, second, sums[tile][2 + j]);
    }
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HEAD_STREAM_CUH_

#include "kernels/cuda/latent_decode.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kWarps = kStreamWarps;
constexpr int32_t kGroupRows = kTokensPerTile;
constexpr int32_t kColumns = 2 * kStreamRows;  // of W_UV's result that a block computes
constexpr int32_t kWarpSteps = kLatentRank / kStepDepth / (kWarps / 2);
constexpr int32_t kLaneColumns = kLatentRank / kWarpSize / 4;  // in fours
// 64 bytes longer than a multiple of 128: a quarter of a warp reads two rows without a conflict.
constexpr int32_t kLatentStride = kLatentRank + 32;

struct Args {
  LatentPartials partials;
  const uint16_t* w_uv;  // [heads, v_dim, 512]; null: the latents themselves
  int32_t num_rows;
  int32_t num_heads;
  int32_t v_dim;
  float* out;
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse;  // may be null
  int64_t lse_stride;
};

struct Shared {
  float parts[kWarps][kLatentRank];
  uint16_t latents[kGroupRows][kLatentStride];
  float4 products[kWarps][kWarpSize];
};

// A row's partials `first`, `first + step` .. folded into columns 4 lane + 128 i .. of `sums`, each
// weighed by its share of the whole; a warp's work.  Returns the row's log-sum-exp.
__device__ float FoldPartials(const LatentPartials& partials, int2 place, int32_t first,
                              int32_t step, float4 (&sums)[kLaneColumns]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t count = place.y;
  const float* lse = partials.lse + place.x;
  const int64_t stride = partials.step;
  const float* out = partials.out + int64_t{place.x} * kLatentRank + 4 * lane;
  float max = -INFINITY;
  for (int32_t p = lane; p < count; p += kWarpSize) max = fmaxf(max, lse[p * stride]);
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  }
  if (max == -INFINITY) return max;  // no keys
  float total = 0;
  for (int32_t p = lane; p < count; p += kWarpSize) total += expf(lse[p * stride] - max);
  total = WarpSum(total);
#pragma unroll 4
  for (int32_t p = first; p < count; p += step) {
    const float weight = expf(lse[p * stride] - max) / total;
    const float* part = out + p * stride * kLatentRank;
#pragma unroll
    for (int32_t i = 0; i < kLaneColumns; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(part + 4 * kWarpSize * i);
      sums[i].x += weight * v.x;
      sums[i].y += weight * v.y;
      sums[i].z += weight * v.z;
      sums[i].w += weight * v.w;
    }
  }
  return max + logf(total);
}

// The warps' shares of 32 columns from `column` on, added and stored; the work of two warps.
__device__ void StoreProducts(const Args& args, const Shared& shared, int64_t head, int32_t column,
                              int32_t first_row, int32_t num_rows) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  float4 total = make_float4(0, 0, 0, 0);
  for (int32_t w = warp; w < kWarps; w += 2) {
    const float4 part = shared.products[w][lane];
    total.x += part.x;
    total.y += part.y;
    total.z += part.z;
    total.w += part.w;
  }
  float* out = args.out + first_row * args.out_row_stride + head * args.out_head_stride + column +
               warp * kStreamRows + lane / 4;
  for (int32_t j = 0; j < 2; ++j) {
    const int32_t row = lane % 4 * 2 + j;
    if (row >= num_rows) continue;
    out[row * args.out_row_stride] = j == 0 ? total.x : total.y;
    out[row * args.out_row_stride + kStreamRows / 2] = j == 0 ? total.z : total.w;
  }
}

// Grid: heads, blocks that share the tiles of kColumns of W_UV's result, groups of rows.
template <bool kProject>
__global__ void __launch_bounds__(kStreamThreads) CombineKernel(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int64_t head = blockIdx.x;
  const int32_t step = warp / 2 * kWarpSteps;
  WeightFragment weights[kWarpSteps];
  const auto load_weights = [&](int32_t tile) {
    const int64_t column = int64_t{tile} * kColumns + warp % 2 * kStreamRows + g;
    const uint16_t* top = args.w_uv + (head * args.v_dim + column) * kLatentRank + 8 * t;
#pragma unroll
    for (int32_t i = 0; i < kWarpSteps; ++i) {
      weights[i] = LoadWeights(top, top + kStreamRows / 2 * kLatentRank, step + i);
    }
  };
  if (kProject) load_weights(static_cast<int32_t>(blockIdx.y));
  WaitForPrevious();
  const int32_t first_row = static_cast<int32_t>(blockIdx.z) * kGroupRows;
  const int32_t num_rows = min(args.num_rows - first_row, kGroupRows);
  const int32_t warps_per_row = num_rows == 1 ? kWarps : num_rows == 2 ? 4 : num_rows <= 4 ? 2 : 1;
  const int32_t own_row = warp / warps_per_row;
  if (own_row < num_rows) {
    const int64_t vector = int64_t{first_row + own_row} * args.num_heads + head;
    float4 sums[kLaneColumns] = {};
    const float lse = FoldPartials(args.partials, args.partials.places[vector],
                                   warp % warps_per_row, warps_per_row, sums);
#pragma unroll
    for (int32_t i = 0; i < kLaneColumns; ++i) {
      *reinterpret_cast<float4*>(&shared.parts[warp][4 * (lane + kWarpSize * i)]) = sums[i];
    }
    if (args.lse != nullptr && blockIdx.y == 0 && lane == 0 && warp % warps_per_row == 0) {
      args.lse[head * args.lse_stride + first_row + own_row] = lse;
    }
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < kGroupRows * kLatentRank; i += kStreamThreads) {
    const int32_t row = i / kLatentRank, d = i % kLatentRank;
    float sum = 0;
    if (row < num_rows) {
      for (int32_t w = 0; w < warps_per_row; ++w) sum += shared.parts[row * warps_per_row + w][d];
      if (!kProject) {
        args.out[(first_row + row) * args.out_row_stride + head * args.out_head_stride + d] = sum;
      }
    }
    if (kProject) shared.latents[row][d] = static_cast<uint16_t>(PackBfloat16(sum, 0));
  }
  if (!kProject) return;
  __syncthreads();
  const int32_t num_tiles = args.v_dim / kColumns;
  for (int32_t tile = blockIdx.y; tile < num_tiles; tile += gridDim.y) {
    float sums[4] = {};
#pragma unroll
    for (int32_t i = 0; i < kWarpSteps; ++i) {
      MultiplyStep(sums, weights[i],
                   *reinterpret_cast<const ActivationFragment*>(
                       &shared.latents[g][(step + i) * kStepDepth + 8 * t]));
    }
    const int32_t next = tile + static_cast<int32_t>(gridDim.y);
    if (next < num_tiles) load_weights(next);
    shared.products[warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (warp < 2) StoreProducts(args, shared, head, tile * kColumns, first_row, num_rows);
    __syncthreads();
  }
}

}  // namespace

bool CanCombineLatents(const AbsorbedDecodeParams& params) {
  return params.w_uv == nullptr ||
         (Bfloat16Heads(*params.w_uv) != nullptr && params.v_head_dim % kColumns == 0);
}

absl::Status CombineLatents(const Launcher& launcher, const AbsorbedDecodeParams& params,
                            const LatentPartials& partials) {
  const Args args{.partials = partials,
                  .w_uv = params.w_uv == nullptr ? nullptr : Bfloat16Heads(*params.w_uv),
                  .num_rows = params.num_rows,
                  .num_heads = params.num_heads,
                  .v_dim = params.v_head_dim,
                  .out = params.out,
                  .out_row_stride = params.out_row_stride,
                  .out_head_stride = params.out_head_stride,
                  .lse = params.lse,
                  .lse_stride = params.lse_stride};
  const auto groups = static_cast<uint32_t>(CeilDiv(params.num_rows, kGroupRows));
  const auto heads = static_cast<uint32_t>(params.num_heads);
  if (args.w_uv == nullptr) {
    return Launch(launcher, "latent combine", CombineKernel<false>,
                  {.grid = dim3(heads, 1, groups), .threads = kStreamThreads, .early = true}, args);
  }
  // With few rows a block a tile; with many, folding the partials again costs more than waiting.
  const auto tiles =
      groups == 1 ? static_cast<uint32_t>(params.v_head_dim / kColumns) : uint32_t{1};
  return Launch(launcher, "latent combine", CombineKernel<true>,
                {.grid = dim3(heads, tiles, groups), .threads = kStreamThreads, .early = true},
                args);
}

}  // namespace kernels::cuda

#include "kernels/cuda/latent_decode.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kWarps = 16;
constexpr int32_t kThreads = kWarps * kWarpSize;
constexpr int32_t kGroupRows = 16;
constexpr int32_t kRowTiles = kGroupRows / kTokensPerTile;
constexpr int32_t kSteps = kLatentRank / kStepDepth;
// 64 bytes longer than a multiple of 128: a quarter of a warp reads two rows without a conflict.
constexpr int32_t kLatentStride = kLatentRank + 32;

struct Args {
  LatentPartials partials;
  const uint16_t* w_uv;  // [heads, v_dim, 512]; null: the latents themselves
  int32_t num_rows;
  int32_t num_heads;
  int32_t v_dim;
  float* out;
  uint16_t* rounded_out;
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse;  // may be null
  int64_t lse_stride;
};

// The rows of a block's group, and how its warps share their partials.
struct Group {
  __device__ Group(int32_t num_rows, int32_t group)
      : first_row(group * kGroupRows), count(min(num_rows - first_row, kGroupRows)) {
    while (count * 2 * warps_per_row <= kWarps) warps_per_row *= 2;
  }
  int32_t first_row;
  int32_t count;
  int32_t warps_per_row = 1;
};

// Folds the warp's share of its row's partials, each weighed by its part of the whole: `parts` gets
// columns `column` .. `column` + 128 kFours.  kBatch of them are under way at a time, the first
// while the weights are being made.
template <int32_t kFours, int32_t kBatch>
__device__ void FoldPartials(const Args& args, const Group& group, int32_t head, int32_t column,
                             float (&parts)[kWarps][kFours * 4 * kWarpSize]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t row = warp / group.warps_per_row, share = warp % group.warps_per_row;
  if (row >= group.count) return;
  const int64_t vector = int64_t{group.first_row + row} * args.num_heads + head;
  const int2 place = args.partials.places[vector];
  const int32_t count = place.y;
  const int32_t step = args.partials.step;
  const float* lse = args.partials.lse + place.x;
  const float* out = args.partials.out + int64_t{place.x} * kLatentRank + column + 4 * lane;
  float4 batch[kBatch][kFours] = {};
  const auto load_batch = [&](int32_t begin) {
#pragma unroll
    for (int32_t j = 0; j < kBatch; ++j) {
      const int32_t p = begin + j * group.warps_per_row;
      if (p >= count) continue;
#pragma unroll
      for (int32_t i = 0; i < kFours; ++i) {
        batch[j][i] =
            *reinterpret_cast<const float4*>(out + p * step * kLatentRank + 4 * kWarpSize * i);
      }
    }
  };
  load_batch(share);
  float max = -INFINITY;
  for (int32_t p = lane; p < count; p += kWarpSize) max = fmaxf(max, lse[p * step]);
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  }
  float4 sums[kFours] = {};
  float total_lse = -INFINITY;
  if (max != -INFINITY) {  // there are keys
    float total = 0;
    for (int32_t p = lane; p < count; p += kWarpSize) total += expf(lse[p * step] - max);
    total = WarpSum(total);
    total_lse = max + logf(total);
    const int32_t batch_partials = kBatch * group.warps_per_row;
    for (int32_t begin = share; begin < count; begin += batch_partials) {
#pragma unroll
      for (int32_t j = 0; j < kBatch; ++j) {
        const int32_t p = begin + j * group.warps_per_row;
        if (p >= count) continue;
        const float weight = expf(lse[p * step] - max) / total;
#pragma unroll
        for (int32_t i = 0; i < kFours; ++i) {
          const float4 v = batch[j][i];
          sums[i].x += weight * v.x;
          sums[i].y += weight * v.y;
          sums[i].z += weight * v.z;
          sums[i].w += weight * v.w;
        }
      }
      load_batch(begin + batch_partials);
    }
  }
#pragma unroll
  for (int32_t i = 0; i < kFours; ++i) {
    *reinterpret_cast<float4*>(&parts[warp][4 * (lane + kWarpSize * i)]) = sums[i];
  }
  if (args.lse != nullptr && blockIdx.y == 0 && share == 0 && lane == 0) {
    args.lse[head * args.lse_stride + group.first_row + row] = total_lse;
  }
}

// The warps' parts of a row's columns `column` .. `column` + 3, added in their order.
template <int32_t kColumns>
__device__ float4 AddParts(const float (&parts)[kWarps][kColumns], const Group& group, int32_t row,
                           int32_t column) {
  float4 sum = make_float4(0, 0, 0, 0);
  if (row >= group.count) return sum;
  for (int32_t w = 0; w < group.warps_per_row; ++w) {
    const auto& part =
        *reinterpret_cast<const float4*>(&parts[row * group.warps_per_row + w][column]);
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  return sum;
}

__device__ void StoreFour(float* to, const float4& values) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(float4) == 0) {
    *reinterpret_cast<float4*>(to) = values;
    return;
  }
  to[0] = values.x;
  to[1] = values.y;
  to[2] = values.z;
  to[3] = values.w;
}

// Latents as they are, a block one of kSlices of their columns.  Grid: heads, slices, groups of
// rows.
template <int32_t kSlices>
__global__ void __launch_bounds__(kThreads, 2) CombineKernel(const __grid_constant__ Args args) {
  constexpr int32_t kColumns = kLatentRank / kSlices;
  constexpr int32_t kFours = kColumns / 4 / kWarpSize;
  __shared__ __align__(16) float parts[kWarps][kColumns];
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int32_t first = static_cast<int32_t>(blockIdx.y) * kColumns;
  const Group group(args.num_rows, static_cast<int32_t>(blockIdx.z));
  WaitForPrevious();
  FoldPartials<kFours, kFours == 1 ? 8 : 2>(args, group, head, first, parts);
  __syncthreads();
  const int32_t row = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  if (row >= group.count) return;
  float* out = args.out + (group.first_row + row) * args.out_row_stride +
               head * args.out_head_stride + first;
#pragma unroll
  for (int32_t i = 0; i < kFours; ++i) {
    const int32_t column = 4 * (static_cast<int32_t>(threadIdx.x) % kWarpSize + kWarpSize * i);
    StoreFour(out + column, AddParts(parts, group, row, column));
  }
}

struct ProjectShared {
  union {
    float parts[kWarps][kLatentRank];
    float4 products[kWarps][kRowTiles][kWarpSize];
  };
  uint16_t latents[kGroupRows][kLatentStride];
};

// Through W_UV.  A block has kTiles tiles of 16 columns of its result, a warp the product of one
// with a part of the latents.  Grid: heads, columns, groups of rows.
template <int32_t kTiles>
__global__ void __launch_bounds__(kThreads, 1) ProjectKernel(const __grid_constant__ Args args) {
  auto& shared = *reinterpret_cast<ProjectShared*>(DynamicShared());
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int32_t first_column = static_cast<int32_t>(blockIdx.y) * kTiles * kStreamRows;
  constexpr int32_t kWarpSteps = kSteps * kTiles / kWarps;
  const int32_t first_step = warp / kTiles * kWarpSteps;
  const int64_t column = first_column + warp % kTiles * kStreamRows + g;
  const uint16_t* top = args.w_uv + (head * int64_t{args.v_dim} + column) * kLatentRank + 8 * t;
  WeightFragment weights[kWarpSteps];
  constexpr int32_t kEarlySteps = kWarpSteps < 4 ? kWarpSteps : 4;  // registers for no more
  const auto load_weights = [&](int32_t begin, int32_t end) {
#pragma unroll
    for (int32_t i = 0; i < kWarpSteps; ++i) {
      if (i < begin || i >= end) continue;
      weights[i] = LoadWeights(top, top + kStreamRows / 2 * kLatentRank, first_step + i);
    }
  };
  load_weights(0, kEarlySteps);
  const Group group(args.num_rows, static_cast<int32_t>(blockIdx.z));
  WaitForPrevious();
  FoldPartials<kLatentRank / kWarpSize / 4, 2>(args, group, head, 0, shared.parts);
  load_weights(kEarlySteps, kWarpSteps);
  __syncthreads();
  for (int32_t e = threadIdx.x; e < kGroupRows * kLatentRank / 4; e += kThreads) {
    const int32_t row = e / (kLatentRank / 4), d = e % (kLatentRank / 4) * 4;
    const float4 sum = AddParts(shared.parts, group, row, d);
    *reinterpret_cast<uint2*>(&shared.latents[row][d]) =
        make_uint2(PackBfloat16(sum.x, sum.y), PackBfloat16(sum.z, sum.w));
  }
  __syncthreads();
  float sums[kRowTiles][4] = {};
#pragma unroll
  for (int32_t i = 0; i < kWarpSteps; ++i) {
#pragma unroll
    for (int32_t tile = 0; tile < kRowTiles; ++tile) {
      MultiplyStep(
          sums[tile], weights[i],
          *reinterpret_cast<const ActivationFragment*>(
              &shared.latents[tile * kTokensPerTile + g][(first_step + i) * kStepDepth + 8 * t]));
    }
  }
#pragma unroll
  for (int32_t tile = 0; tile < kRowTiles; ++tile) {
    shared.products[warp][tile][lane] =
        make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]);
  }
  __syncthreads();
  // A warp a tile of columns and of rows: the parts of the latents are added in their order.
  if (warp >= kTiles * kRowTiles) return;
  const int32_t row_tile = warp / kTiles;
  float total[4] = {};
  for (int32_t w = warp % kTiles; w < kWarps; w += kTiles) {
    const float4 part = shared.products[w][row_tile][lane];
    total[0] += part.x;
    total[1] += part.y;
    total[2] += part.z;
    total[3] += part.w;
  }
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t row = row_tile * kTokensPerTile + 2 * t + i % 2;
    if (row >= group.count) continue;
    StoreElement(args.out, args.rounded_out,
                 (group.first_row + row) * args.out_row_stride + head * args.out_head_stride +
                     column + i / 2 * (kStreamRows / 2),
                 total[i]);
  }
}

template <int32_t kSlices>
absl::Status LaunchCombine(const Launcher& launcher, uint32_t groups, const Args& args) {
  const dim3 grid(static_cast<uint32_t>(args.num_heads), kSlices, groups);
  return Launch(launcher, "latent combine", CombineKernel<kSlices>,
                {.grid = grid, .threads = kThreads, .early = true}, args);
}

template <int32_t kTiles>
absl::Status LaunchProject(const Launcher& launcher, uint32_t groups, const Args& args) {
  const dim3 grid(static_cast<uint32_t>(args.num_heads),
                  static_cast<uint32_t>(args.v_dim / (kTiles * kStreamRows)), groups);
  return Launch(
      launcher, "latent combine", ProjectKernel<kTiles>,
      {.grid = grid, .threads = kThreads, .shared_bytes = sizeof(ProjectShared), .early = true},
      args);
}

// A block has few columns as long as all blocks run at once.
constexpr int32_t kManySlices = 4;
constexpr int32_t kFewSlices = 2;
constexpr int32_t kFewTiles = 2;
constexpr int32_t kManyTiles = 8;

}  // namespace

bool CanCombineLatents(const AbsorbedDecodeParams& params) {
  return params.w_uv == nullptr || (Bfloat16Heads(*params.w_uv) != nullptr &&
                                    params.v_head_dim % (kFewTiles * kStreamRows) == 0);
}

absl::Status CombineLatents(const Launcher& launcher, const AbsorbedDecodeParams& params,
                            const LatentPartials& partials) {
  const Args args{.partials = partials,
                  .w_uv = params.w_uv == nullptr ? nullptr : Bfloat16Heads(*params.w_uv),
                  .num_rows = params.num_rows,
                  .num_heads = params.num_heads,
                  .v_dim = params.v_head_dim,
                  .out = params.out,
                  .rounded_out = params.rounded_out,
                  .out_row_stride = params.out_row_stride,
                  .out_head_stride = params.out_head_stride,
                  .lse = params.lse,
                  .lse_stride = params.lse_stride};
  const auto groups = static_cast<uint32_t>(CeilDiv(params.num_rows, kGroupRows));
  const int64_t most = launcher.device.num_sms / (int64_t{groups} * args.num_heads);  // a group's
  if (args.w_uv == nullptr) {
    return most >= kManySlices ? LaunchCombine<kManySlices>(launcher, groups, args)
                               : LaunchCombine<kFewSlices>(launcher, groups, args);
  }
  if (most >= args.v_dim / (kFewTiles * kStreamRows) ||
      args.v_dim % (kManyTiles * kStreamRows) != 0) {
    return LaunchProject<kFewTiles>(launcher, groups, args);
  }
  return LaunchProject<kManyTiles>(launcher, groups, args);
}

}  // namespace kernels::cuda

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_latent.h"
#include "kernels/cuda/sparse_result.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kHeadsPerBlock = kThreads / kWarpSize;
constexpr int32_t kPieces = kSparseValueDim / 4 / kWarpSize;  // of a lane, 4 values each

// Grid: groups of heads, rows; a warp a head.
__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ SparseArgs args, int32_t num_parts) {
  WaitForPrevious();
  const SparseDecodeParams& params = args.params;
  const int32_t head = static_cast<int32_t>(blockIdx.x) * kHeadsPerBlock +
                       static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  if (head >= params.num_heads) return;
  const int64_t first = int64_t{row} * num_parts * params.num_heads + head;
  const float* lses = args.parts.lse + first;
  const auto* values =
      reinterpret_cast<const float4*>(args.parts.values + first * kSparseValueDim) + lane;
  float max = -INFINITY;
  for (int32_t i = lane; i < num_parts; i += kWarpSize) {
    max = fmaxf(max, lses[int64_t{i} * params.num_heads]);
  }
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  }
  float sum = 0;
  float4 out[kPieces] = {};
  for (int32_t i = 0; i < num_parts; ++i) {
    const float part_lse = lses[int64_t{i} * params.num_heads];
    if (part_lse == -INFINITY) continue;
    const float weight = expf(part_lse - max);
    sum += weight;
    const float4* part = values + int64_t{i} * params.num_heads * (kSparseValueDim / 4);
#pragma unroll
    for (int32_t j = 0; j < kPieces; ++j) {
      const float4 value = part[j * kWarpSize];
      out[j].x = fmaf(weight, value.x, out[j].x);
      out[j].y = fmaf(weight, value.y, out[j].y);
      out[j].z = fmaf(weight, value.z, out[j].z);
      out[j].w = fmaf(weight, value.w, out[j].w);
    }
  }
  const float lse = sum == 0 ? -INFINITY : max + logf(sum);
  float scale = sum == 0 ? 0.0f : 1.0f / sum;
  if (params.sink != nullptr) scale *= SinkFactor(params.sink[head], lse);
  const int32_t column = 4 * lane;  // of the first piece; the next ones are 128 further on each
  constexpr int32_t kLastColumn = 4 * kWarpSize * (kPieces - 1);
  const int32_t pair = (kLastColumn + column - (kSparseValueDim - kSparseRope)) / 2;
  if (RotatesBack(args, row, head == 0 && lane == 0) && pair >= 0) {
    float4& last = out[kPieces - 1];
    const int32_t position = params.positions[row];
    const float2 a = RotateBack(params.inverse_rope, position, pair, make_float2(last.x, last.y));
    const float2 b =
        RotateBack(params.inverse_rope, position, pair + 1, make_float2(last.z, last.w));
    last = make_float4(a.x, a.y, b.x, b.y);
  }
  auto* to = reinterpret_cast<float4*>(args.values + row * args.row_stride +
                                       head * args.head_stride + column);
#pragma unroll
  for (int32_t j = 0; j < kPieces; ++j) {
    to[j * kWarpSize] =
        make_float4(out[j].x * scale, out[j].y * scale, out[j].z * scale, out[j].w * scale);
  }
  if (lane == 0 && params.lse != nullptr) params.lse[head * params.lse_stride + row] = lse;
}

}  // namespace

absl::Status CombineSparseParts(const Launcher& launcher, const SparseArgs& args,
                                int32_t num_parts) {
  return Launch(launcher, "sparse_decode combine", CombineKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(args.params.num_heads, kHeadsPerBlock)),
                              static_cast<uint32_t>(args.params.num_rows)),
                 .threads = kThreads,
                 .early = true},
                args, num_parts);
}

}  // namespace kernels::cuda

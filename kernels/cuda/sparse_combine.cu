#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_latent.h"
#include "kernels/cuda/sparse_result.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kCombineThreads = kSparseValueDim / 4;

// Grid: heads, rows.
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const __grid_constant__ SparseArgs args, int32_t num_parts) {
  WaitForPrevious();
  const SparseDecodeParams& params = args.params;
  const int32_t head = static_cast<int32_t>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const int64_t first = int64_t{row} * num_parts * params.num_heads + head;
  const float* lses = args.parts.lse + first;
  const auto* values =
      reinterpret_cast<const float4*>(args.parts.values + first * kSparseValueDim) + threadIdx.x;
  float max = -INFINITY;
  for (int32_t i = 0; i < num_parts; ++i) max = fmaxf(max, lses[i * params.num_heads]);
  float sum = 0;
  float4 out = make_float4(0, 0, 0, 0);
  for (int32_t i = 0; i < num_parts; ++i) {
    const float part_lse = lses[i * params.num_heads];
    if (part_lse == -INFINITY) continue;
    const float weight = expf(part_lse - max);
    const float4 value = values[int64_t{i} * params.num_heads * kCombineThreads];
    sum += weight;
    out.x = fmaf(weight, value.x, out.x);
    out.y = fmaf(weight, value.y, out.y);
    out.z = fmaf(weight, value.z, out.z);
    out.w = fmaf(weight, value.w, out.w);
  }
  float scale = sum == 0 ? 0.0f : 1.0f / sum;
  if (params.sink != nullptr && sum > 0) scale *= SinkFactor(params.sink[head], max + logf(sum));
  const int32_t column = 4 * static_cast<int32_t>(threadIdx.x);
  if (RotatesBack(args, row, head == 0 && threadIdx.x == 0) &&
      column >= kSparseValueDim - kSparseRope) {
    const int32_t pair = (column - (kSparseValueDim - kSparseRope)) / 2;
    const int32_t position = params.positions[row];
    const float2 first_pair =
        RotateBack(params.inverse_rope, position, pair, make_float2(out.x, out.y));
    const float2 second_pair =
        RotateBack(params.inverse_rope, position, pair + 1, make_float2(out.z, out.w));
    out = make_float4(first_pair.x, first_pair.y, second_pair.x, second_pair.y);
  }
  auto* to = args.values + row * args.row_stride + head * args.head_stride + column;
  *reinterpret_cast<float4*>(to) =
      make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
  if (threadIdx.x == 0 && params.lse != nullptr) {
    params.lse[head * params.lse_stride + row] = sum == 0 ? -INFINITY : max + logf(sum);
  }
}

}  // namespace

absl::Status CombineSparseParts(const Launcher& launcher, const SparseArgs& args,
                                int32_t num_parts) {
  return Launch(launcher, "sparse_decode combine", CombineKernel,
                {.grid = dim3(static_cast<uint32_t>(args.params.num_heads),
                              static_cast<uint32_t>(args.params.num_rows)),
                 .threads = kCombineThreads,
                 .early = true},
                args, num_parts);
}

}  // namespace kernels::cuda

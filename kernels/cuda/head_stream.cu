#include "kernels/cuda/head_stream.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {
namespace {

struct Args {
  const uint16_t* weight = nullptr;  // [heads, columns, depth]
  int64_t columns = 0;
  int64_t depth = 0;
  int32_t num_rows = 0;
  const float* input = nullptr;
  int64_t input_row_stride = 0;
  int64_t input_head_stride = 0;
  float* output = nullptr;
  int64_t output_row_stride = 0;
  int64_t output_head_stride = 0;
};

constexpr int32_t kColumnsPerBlock = kStreamWarps * kStreamRows;

// Grid: columns, heads, groups of rows.  A warp has 16 columns and the whole depth.
template <int32_t kTiles>
__global__ void __launch_bounds__(kStreamThreads) HeadStreamKernel(Args args) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int64_t head = blockIdx.y;
  const int32_t row_begin = static_cast<int32_t>(blockIdx.z) * kTiles * kTokensPerTile;
  const int64_t first = int64_t{blockIdx.x} * kColumnsPerBlock + warp * kStreamRows + g;
  const int64_t second = first + kStreamRows / 2;
  // Columns past the end are read at the last one and not stored.
  const int64_t last = args.columns - 1;
  const uint16_t* weight = args.weight + head * args.columns * args.depth + 8 * t;
  const float* input = args.input + head * args.input_head_stride + 8 * t;
  const auto load_x = [&](int32_t tile, int32_t step) {
    const int32_t row = row_begin + tile * kTokensPerTile + g;
    if (row >= args.num_rows) return ActivationFragment{};
    const auto* from = reinterpret_cast<const float4*>(input + row * args.input_row_stride +
                                                       int64_t{step} * kStepDepth);
    return RoundFragment(from[0], from[1]);
  };
  float sums[kTiles][4] = {};
  const StepRange steps{0, static_cast<int32_t>(args.depth / kStepDepth)};
  StreamRows<kTiles>(sums, weight + (first < last ? first : last) * args.depth,
                     weight + (second < last ? second : last) * args.depth, steps, load_x,
                     [] { WaitForPrevious(); });
  float* output = args.output + head * args.output_head_stride;
  for (int32_t tile = 0; tile < kTiles; ++tile) {
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t row = row_begin + tile * kTokensPerTile + 2 * t + j;
      if (row >= args.num_rows) continue;
      if (first < args.columns) output[row * args.output_row_stride + first] = sums[tile][j];
      if (second < args.columns) output[row * args.output_row_stride + second] = sums[tile][2 + j];
    }
  }
}

}  // namespace

bool CanStreamHeads(const HeadLinearParams& params) {
  return params.weight->in_features() % kStepDepth == 0 && params.input_row_stride % 4 == 0 &&
         params.input_head_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(params.input) % sizeof(float4) == 0;
}

absl::Status StreamHeadLinear(const Launcher& launcher, const HeadLinearParams& params,
                              const uint16_t* weight) {
  const Args args{.weight = weight,
                  .columns = params.weight->out_features(),
                  .depth = params.weight->in_features(),
                  .num_rows = params.num_rows,
                  .input = params.input,
                  .input_row_stride = params.input_row_stride,
                  .input_head_stride = params.input_head_stride,
                  .output = params.output,
                  .output_row_stride = params.output_row_stride,
                  .output_head_stride = params.output_head_stride};
  constexpr int32_t kMany = 4;  // tiles of a block that has many rows
  const int32_t tiles = params.num_rows <= kTokensPerTile ? 1 : kMany;
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(CeilDiv(args.columns, int64_t{kColumnsPerBlock})),
                   static_cast<uint32_t>(params.weight->num_heads()),
                   static_cast<uint32_t>(CeilDiv(params.num_rows, tiles * kTokensPerTile))),
      .threads = kStreamThreads,
      .early = true};
  return tiles == 1 ? Launch(launcher, "head stream", HeadStreamKernel<1>, shape, args)
                    : Launch(launcher, "head stream", HeadStreamKernel<kMany>, shape, args);
}

}  // namespace kernels::cuda

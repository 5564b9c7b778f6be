#include "kernels/cuda/skinny_linear.h"

#include <algorithm>

#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_ring.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kSteps = 4;  // of a chunk

// Of a row of activations: what lanes of two rows read at a time lies in different banks.
constexpr int32_t PaddingOf(WeightFormat format) {
  return format == WeightFormat::kBfloat16 ? 32 : 8;
}

struct Args {
  StreamedMatrix weight;  // [rows, depth]
  CachePolicy weight_policy = kEvictFirst;
  int64_t depth = 0;
  int64_t columns = 0;  // of the output
  int32_t num_tiles = 0;
  const float* input = nullptr;
  int64_t input_row_stride = 0;
  int32_t num_rows = 0;
  const float* norm_weight = nullptr;  // null: no norm
  float norm_eps = 0;
  bool swiglu = false;
  float swiglu_limit = 0;
  LinearOutput output;
};

// Pieces of 4 columns that a thread loads together, every kStreamThreads-th.
constexpr int32_t kPieces = 2;
struct ColumnPieces {
  float4 value[kPieces];

  // Those from column `begin` on, as far as there are any.
  __device__ void Load(const float* from, int32_t begin, int32_t depth) {
#pragma unroll
    for (int32_t i = 0; i < kPieces; ++i) {
      const int32_t column = begin + 4 * i * kStreamThreads;
      if (column < depth) value[i] = *reinterpret_cast<const float4*>(from + column);
    }
  }
};

// Rows times norm_weight in bf16 -> x, and 1 / rms of each; the block's work.  A product of
// normed rows is that of these, scaled.  `first_norm`: the thread's first pieces of norm_weight.
template <WeightFormat kFormat>
__device__ void PrepareRows(const Args& args, const ColumnPieces& first_norm, uint16_t* x,
                            float* inverses) {
  __shared__ float partial[kStreamWarps][kMaxSkinnyRows];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const auto depth = static_cast<int32_t>(args.depth);
  for (int32_t row = 0; row < args.num_rows; ++row) {
    const float* from = args.input + row * args.input_row_stride;
    uint16_t* to = x + row * (depth + PaddingOf(kFormat));
    float sum = 0;
    const int32_t first = 4 * static_cast<int32_t>(threadIdx.x);
    for (int32_t begin = first; begin < depth; begin += 4 * kPieces * kStreamThreads) {
      ColumnPieces values, norm = first_norm;
      values.Load(from, begin, depth);
      if (begin != first && args.norm_weight != nullptr) norm.Load(args.norm_weight, begin, depth);
#pragma unroll
      for (int32_t i = 0; i < kPieces; ++i) {
        const int32_t column = begin + 4 * i * kStreamThreads;
        if (column >= depth) break;
        float4 v = values.value[i];
        if (args.norm_weight != nullptr) {
          const float4 n = norm.value[i];
          sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
          v = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        }
        if constexpr (SwapsActivations(kFormat)) v = make_float4(v.x, v.z, v.y, v.w);
        *reinterpret_cast<uint2*>(to + column) =
            make_uint2(PackBfloat16(v.x, v.y), PackBfloat16(v.z, v.w));
      }
    }
    if (args.norm_weight == nullptr) continue;
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) partial[warp][row] = sum;
  }
  __syncthreads();
  const auto row = static_cast<int32_t>(threadIdx.x);
  if (row < args.num_rows) {
    float inverse = 1;
    if (args.norm_weight != nullptr) {
      float sum = 0;
      for (int32_t w = 0; w < kStreamWarps; ++w) sum += partial[w][row];
      inverse = __frcp_rn(__fsqrt_rn(sum / static_cast<float>(depth) + args.norm_eps));
    }
    inverses[row] = inverse;
  }
  __syncthreads();
}

template <WeightFormat kFormat, int32_t kDepth>
using RingFor = WeightRing<kSteps, kDepth, kFormat != WeightFormat::kBfloat16>;

// Grid: as many blocks as run at once; a block every gridDim.x-th tile of 16 weight rows:
// consecutive ones, or with SwiGLU 8 gate rows and the 8 up rows of the same columns.  Shared: the
// ring, then the rows.
template <WeightFormat kFormat, int32_t kTiles, int32_t kDepth>
__global__ void __launch_bounds__(kStreamThreads, 1)
    SkinnyKernel(const __grid_constant__ Args args) {
  using Ring = RingFor<kFormat, kDepth>;
  constexpr int32_t kPadding = PaddingOf(kFormat);
  __shared__ WarpSums<kTiles> reduce[2];
  __shared__ float inverses[kMaxSkinnyRows];
  Ring ring(DynamicShared(), args.weight_policy);
  auto* rows = reinterpret_cast<uint16_t*>(DynamicShared() + Ring::kBytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const StepRange steps =
      StepsOfWarp(static_cast<int32_t>(args.depth / StepDepthOf(kFormat)), warp);
  const int64_t tile_columns = args.swiglu ? kStreamRows / 2 : kStreamRows;

  auto tile = static_cast<int32_t>(blockIdx.x);  // to be sent for
  int32_t step = steps.end;                      // of it; the end: it is to be entered
  LaneRows weights;
  const auto send = [&] {
    if (step >= steps.end) {
      if (tile >= args.num_tiles) {
        ring.PushNothing();
        return;
      }
      weights = LineUp<kFormat>(args.depth, [&](int32_t i) {
        // Rows past the end are read at the last one and not stored.
        const bool is_up = args.swiglu && i >= kStreamRows / 2;
        const int64_t column = tile * tile_columns + i - (is_up ? kStreamRows / 2 : 0);
        return StreamedRow{args.weight, min(column, args.columns - 1) + (is_up ? args.columns : 0)};
      });
      step = steps.begin;
    }
    ring.Push(weights, step, steps.end - step);
    step += kSteps;
    if (step >= steps.end) tile += static_cast<int32_t>(gridDim.x);
  };
  for (int32_t i = 0; i < kDepth; ++i) send();
  ColumnPieces norm = {};
  if (args.norm_weight != nullptr) {
    norm.Load(args.norm_weight, 4 * static_cast<int32_t>(threadIdx.x),
              static_cast<int32_t>(args.depth));
  }
  WaitForPrevious();
  PrepareRows<kFormat>(args, norm, rows, inverses);

  const uint16_t* x[kTiles];
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
    const int32_t row = min(i * kTokensPerTile + g, args.num_rows - 1);
    x[i] = rows + row * (static_cast<int32_t>(args.depth) + kPadding) +
           StepActivations<kFormat>::kValues * t;
  }
  int32_t buffer = 0;
  for (int32_t at = static_cast<int32_t>(blockIdx.x); at < args.num_tiles;
       at += static_cast<int32_t>(gridDim.x), buffer ^= 1) {
    const int64_t first = at * tile_columns + g, second = first + kStreamRows / 2;
    float residuals[2][2] = {};  // under way during the product
    if (warp < kTiles && !args.swiglu) {
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t row = warp * kTokensPerTile + 2 * t + j;
        if (row >= args.num_rows) continue;
        residuals[0][j] = LoadResidual(args.output, row, first);
        residuals[1][j] = LoadResidual(args.output, row, second);
      }
    }
    float sums[kTiles][4] = {};
    // Of fp8 weights, loads ahead cost more than they save: V4's q_b of 8 rows 33.9 -> 35.9 us.
    constexpr bool kAhead = kFormat == WeightFormat::kBfloat16;
    ring.template MultiplyAll<kFormat, kAhead>(sums, x, kTiles, steps, send);
    const float4 total = ReduceOverWarps<kTiles>(sums, reduce[buffer]);
    if (warp >= kTiles) continue;
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t row = warp * kTokensPerTile + 2 * t + j;
      if (row >= args.num_rows) continue;
      const float a = (j == 0 ? total.x : total.y) * inverses[row];
      const float b = (j == 0 ? total.z : total.w) * inverses[row];
      if (args.swiglu) {
        StoreValue(args.output, row, first, SwiGlu(a, b, args.swiglu_limit));
      } else {
        StoreValue(args.output, row, first, a + residuals[0][j]);
        StoreValue(args.output, row, second, b + residuals[1][j]);
      }
    }
  }
}

// The depths of a ring, and what they leave for rows.
constexpr int32_t kDeep = 6;
constexpr int32_t kMiddle = 4;
constexpr int32_t kShallow = 3;
template <WeightFormat kFormat>
constexpr int32_t kShallowest = kFormat == WeightFormat::kBfloat16 ? kShallow : 2;

constexpr size_t kStaticBytes = 20 * 1024;

template <WeightFormat kFormat>
size_t RowBytes(int32_t num_rows, int64_t depth) {
  return sizeof(uint16_t) * static_cast<size_t>(num_rows * (depth + PaddingOf(kFormat)));
}
template <WeightFormat kFormat, int32_t kDepth>
bool Fits(int32_t num_rows, int64_t depth) {
  return RingFor<kFormat, kDepth>::kBytes + RowBytes<kFormat>(num_rows, depth) + kStaticBytes <=
         kMaxSharedBytes;
}
template <WeightFormat kFormat>
bool CanStream(int32_t num_rows, int64_t depth) {
  return depth % StepDepthOf(kFormat) == 0 && Fits<kFormat, kShallowest<kFormat>>(num_rows, depth);
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <WeightFormat kFormat, int32_t kTiles, int32_t kDepth>
absl::Status LaunchDepth(const Launcher& launcher, const Args& args) {
  return Launch(
      launcher, "skinny linear", SkinnyKernel<kFormat, kTiles, kDepth>,
      {.grid = dim3(static_cast<uint32_t>(std::min(args.num_tiles, launcher.device.num_sms))),
       .threads = kStreamThreads,
       .shared_bytes =
           RingFor<kFormat, kDepth>::kBytes + RowBytes<kFormat>(args.num_rows, args.depth),
       .early = true},
      args);
}
template <WeightFormat kFormat, int32_t kTiles>
absl::Status LaunchTiles(const Launcher& launcher, const Args& args) {
  // No deeper than a block's work: what is left is for the kernels before and after.
  const int32_t chunks =
      CeilDiv(CeilDiv(static_cast<int32_t>(args.depth) / StepDepthOf(kFormat), kStreamWarps),
              kSteps) *
      CeilDiv(args.num_tiles, launcher.device.num_sms);
  if (chunks <= kMiddle && Fits<kFormat, kMiddle>(args.num_rows, args.depth)) {
    return LaunchDepth<kFormat, kTiles, kMiddle>(launcher, args);
  }
  const auto launch = Fits<kFormat, kDeep>(args.num_rows, args.depth)
                          ? LaunchDepth<kFormat, kTiles, kDeep>
                      : Fits<kFormat, kShallow>(args.num_rows, args.depth)
                          ? LaunchDepth<kFormat, kTiles, kShallow>
                          : LaunchDepth<kFormat, kTiles, kShallowest<kFormat>>;
  return launch(launcher, args);
}
template <WeightFormat kFormat>
absl::Status LaunchFormat(const Launcher& launcher, const Args& args) {
  return args.num_rows <= kTokensPerTile ? LaunchTiles<kFormat, 1>(launcher, args)
                                         : LaunchTiles<kFormat, 2>(launcher, args);
}

}  // namespace

bool CanRunSkinny(const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const auto format = StreamFormatOf(matrix);
  return weight.num_parts == 1 && params.num_rows <= kMaxSkinnyRows &&
         ((format == WeightFormat::kBfloat16 &&
           CanStream<WeightFormat::kBfloat16>(params.num_rows, matrix.cols)) ||
          (format == WeightFormat::kFloat8 &&
           CanStream<WeightFormat::kFloat8>(params.num_rows, matrix.cols))) &&
         params.input.dtype == DType::kFloat32 && params.input.row_stride % 4 == 0 &&
         IsAligned(params.input.data) && IsAligned(params.norm_weight) &&
         params.residual_in == nullptr && params.residual_out == nullptr;
}

absl::Status SkinnyLinear(const Launcher& launcher, const LinearParams& params,
                          const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  const int64_t columns = swiglu ? matrix.rows / 2 : matrix.rows;
  const int64_t tile_columns = swiglu ? kStreamRows / 2 : kStreamRows;
  const Args args{.weight = AsStreamed(matrix),
                  .depth = matrix.cols,
                  .columns = columns,
                  .num_tiles = static_cast<int32_t>(CeilDiv(columns, tile_columns)),
                  .input = static_cast<const float*>(params.input.data),
                  .input_row_stride = params.input.row_stride,
                  .num_rows = params.num_rows,
                  .norm_weight = params.norm_weight,
                  .norm_eps = params.norm_eps,
                  .swiglu = swiglu,
                  .swiglu_limit = params.swiglu_limit,
                  .output = MakeLinearOutput(params)};
  return StreamFormatOf(matrix) == WeightFormat::kFloat8
             ? LaunchFormat<WeightFormat::kFloat8>(launcher, args)
             : LaunchFormat<WeightFormat::kBfloat16>(launcher, args);
}

}  // namespace kernels::cuda

#include "kernels/cuda/skinny_linear.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_ring.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kSteps = 4;     // of a chunk
constexpr int32_t kPadding = 32;  // of a row of activations: rows lie in different banks

struct Args {
  const uint16_t* weight = nullptr;  // [rows, depth] bf16
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
__device__ void PrepareRows(const Args& args, const ColumnPieces& first_norm, uint16_t* x,
                            float* inverses) {
  __shared__ float partial[kStreamWarps][kMaxSkinnyRows];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const auto depth = static_cast<int32_t>(args.depth);
  for (int32_t row = 0; row < args.num_rows; ++row) {
    const float* from = args.input + row * args.input_row_stride;
    uint16_t* to = x + row * (depth + kPadding);
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

// Grid: as many blocks as run at once; a block every gridDim.x-th tile of 16 weight rows:
// consecutive ones, or with SwiGLU 8 gate rows and the 8 up rows of the same columns.  Shared: the
// ring, then the rows.
template <int32_t kTiles, int32_t kDepth>
__global__ void __launch_bounds__(kStreamThreads, 1)
    SkinnyKernel(const __grid_constant__ Args args) {
  using Ring = WeightRing<1, kSteps, kDepth>;
  __shared__ WarpSums<kTiles> reduce[2];
  __shared__ float inverses[kMaxSkinnyRows];
  Ring ring(DynamicShared());
  auto* rows = reinterpret_cast<uint16_t*>(DynamicShared() + Ring::kBytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const StepRange steps = StepsOfWarp(static_cast<int32_t>(args.depth / kStepDepth), warp);
  const int64_t tile_columns = args.swiglu ? kStreamRows / 2 : kStreamRows;

  auto tile = static_cast<int32_t>(blockIdx.x);  // to be sent for
  int32_t step = steps.end;                      // of it; the end: it is to be entered
  const uint16_t* weights[2];
  const auto send = [&] {
    if (step >= steps.end) {
      if (tile >= args.num_tiles) {
        ring.PushNothing();
        return;
      }
      // Rows past the end are read at the last one and not stored.
      const int64_t last = args.columns - 1;
      const int64_t first = tile * tile_columns + g;
      const int64_t top = min(first, last);
      const int64_t bottom = args.swiglu ? args.columns + top : min(first + kStreamRows / 2, last);
      weights[0] = args.weight + top * args.depth + 8 * t;
      weights[1] = args.weight + bottom * args.depth + 8 * t;
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
  PrepareRows(args, norm, rows, inverses);

  const uint16_t* x[kTiles];
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
    const int32_t row = min(i * kTokensPerTile + g, args.num_rows - 1);
    x[i] = rows + row * (static_cast<int32_t>(args.depth) + kPadding) + 8 * t;
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
    for (int32_t s = steps.begin; s < steps.end; s += kSteps) {
      ring.template Multiply<kTiles>(sums, x, kTiles, s, steps.end - s);
      send();
    }
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
constexpr int32_t kShallow = 3;

template <int32_t kDepth>
constexpr size_t kRingBytes = WeightRing<1, kSteps, kDepth>::kBytes;
constexpr size_t kStaticBytes = 20 * 1024;

size_t RowBytes(int32_t num_rows, int64_t depth) {
  return sizeof(uint16_t) * static_cast<size_t>(num_rows * (depth + kPadding));
}
bool Fits(size_t ring_bytes, int32_t num_rows, int64_t depth) {
  return ring_bytes + RowBytes(num_rows, depth) + kStaticBytes <= kMaxSharedBytes;
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <int32_t kTiles>
absl::Status LaunchTiles(const Launcher& launcher, const Args& args) {
  const bool deep = Fits(kRingBytes<kDeep>, args.num_rows, args.depth);
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(std::min(args.num_tiles, launcher.device.num_sms))),
      .threads = kStreamThreads,
      .shared_bytes =
          (deep ? kRingBytes<kDeep> : kRingBytes<kShallow>)+RowBytes(args.num_rows, args.depth),
      .early = true};
  return deep ? Launch(launcher, "skinny linear", SkinnyKernel<kTiles, kDeep>, shape, args)
              : Launch(launcher, "skinny linear", SkinnyKernel<kTiles, kShallow>, shape, args);
}

}  // namespace

bool CanRunSkinny(const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  return weight.num_parts == 1 && matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr &&
         matrix.cols % kStepDepth == 0 && params.num_rows <= kMaxSkinnyRows &&
         Fits(kRingBytes<kShallow>, params.num_rows, matrix.cols) &&
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
  const Args args{.weight = static_cast<const uint16_t*>(matrix.data),
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
  return params.num_rows <= kTokensPerTile ? LaunchTiles<1>(launcher, args)
                                           : LaunchTiles<2>(launcher, args);
}

}  // namespace kernels::cuda

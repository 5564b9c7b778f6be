#include "kernels/cuda/skinny_linear.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {
namespace {

struct Args {
  const uint16_t* weight = nullptr;  // [rows, depth] bf16
  int64_t depth = 0;
  int64_t columns = 0;  // of the output
  const float* input = nullptr;
  int64_t input_row_stride = 0;
  int32_t num_rows = 0;
  const float* norm_weight = nullptr;  // null: no norm
  float norm_eps = 0;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  float swiglu_limit = 0;
  LinearOutput output;
};

__device__ void StoreWithin(const Args& args, int64_t row, int64_t column, float value) {
  if (row < args.num_rows) Store(args.output, row, column, value);
}

// 1 / rms of every row, in shared memory; the block's work.
template <int32_t kRows>
__device__ void ComputeInverses(const Args& args, float (&inverses)[kRows]) {
  __shared__ double partial[kStreamWarps][kRows];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  for (int32_t r = 0; r < kRows && r < args.num_rows; ++r) {
    const float* x = args.input + r * args.input_row_stride;
    double sum = 0;
    for (int64_t i = 4 * int64_t{threadIdx.x}; i < args.depth; i += 4 * kStreamThreads) {
      const float4 v = *reinterpret_cast<const float4*>(x + i);
      sum += static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y +
             static_cast<double>(v.z) * v.z + static_cast<double>(v.w) * v.w;
    }
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) partial[warp][r] = sum;
  }
  __syncthreads();
  const int32_t r = static_cast<int32_t>(threadIdx.x);
  if (r < kRows && r < args.num_rows) {
    double sum = 0;
    for (int32_t w = 0; w < kStreamWarps; ++w) sum += partial[w][r];
    inverses[r] = static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(args.depth) + static_cast<double>(args.norm_eps)));
  }
  __syncthreads();
}

// One block a tile of 16 weight rows: consecutive ones, or with kSwiGlu 8 gate rows and the 8 up
// rows of the same columns.
template <int32_t kTiles>
__global__ void __launch_bounds__(kStreamThreads) SkinnyKernel(Args args) {
  __shared__ WarpSums<kTiles> reduce;
  __shared__ float inverses[kTiles * kTokensPerTile];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const bool swiglu = args.epilogue == LinearEpilogue::kSwiGlu;
  const int64_t first = int64_t{blockIdx.x} * (swiglu ? kStreamRows / 2 : kStreamRows) + g;
  const int64_t second = first + kStreamRows / 2;
  // Rows past the end are read at the last one and not stored.
  const int64_t last = args.columns - 1;
  const int64_t top = first < last ? first : last;
  const int64_t bottom = swiglu ? args.columns + top : second < last ? second : last;

  const auto load_x = [&](int32_t tile, int32_t step) {
    const int32_t row = tile * kTokensPerTile + g;
    if (row >= args.num_rows) return ActivationFragment{};
    const int64_t k = int64_t{step} * kStepDepth + 8 * t;
    const auto* from =
        reinterpret_cast<const float4*>(args.input + row * args.input_row_stride + k);
    float4 a = from[0], b = from[1];
    if (args.norm_weight != nullptr) {
      const auto* norm = reinterpret_cast<const float4*>(args.norm_weight + k);
      const float4 na = norm[0], nb = norm[1];
      const float inverse = inverses[row];
      a = make_float4(a.x * inverse * na.x, a.y * inverse * na.y, a.z * inverse * na.z,
                      a.w * inverse * na.w);
      b = make_float4(b.x * inverse * nb.x, b.y * inverse * nb.y, b.z * inverse * nb.z,
                      b.w * inverse * nb.w);
    }
    return RoundFragment(a, b);
  };
  float sums[kTiles][4] = {};
  StreamRows<kTiles>(sums, args.weight + top * args.depth + 8 * t,
                     args.weight + bottom * args.depth + 8 * t,
                     StepsOfWarp(static_cast<int32_t>(args.depth / kStepDepth), warp), load_x, [&] {
                       if (args.norm_weight != nullptr) ComputeInverses(args, inverses);
                     });
  const float4 total = ReduceOverWarps<kTiles>(sums, reduce);
  if (warp >= kTiles) return;
  const int64_t row = warp * kTokensPerTile + 2 * t;
  if (swiglu) {
    StoreWithin(args, row, first, SwiGlu(total.x, total.z, args.swiglu_limit));
    StoreWithin(args, row + 1, first, SwiGlu(total.y, total.w, args.swiglu_limit));
  } else {
    StoreWithin(args, row, first, total.x);
    StoreWithin(args, row + 1, first, total.y);
    StoreWithin(args, row, second, total.z);
    StoreWithin(args, row + 1, second, total.w);
  }
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool CanRunSkinny(const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  return weight.num_parts == 1 && matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr &&
         matrix.cols % kStepDepth == 0 && params.num_rows <= kMaxSkinnyRows &&
         params.input.dtype == DType::kFloat32 && params.input.row_stride % 4 == 0 &&
         IsAligned(params.input.data) && IsAligned(params.norm_weight) &&
         params.residual_in == nullptr && params.residual_out == nullptr;
}

absl::Status SkinnyLinear(const Launcher& launcher, const LinearParams& params,
                          const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  Args args{.weight = static_cast<const uint16_t*>(matrix.data),
            .depth = matrix.cols,
            .columns = swiglu ? matrix.rows / 2 : matrix.rows,
            .input = static_cast<const float*>(params.input.data),
            .input_row_stride = params.input.row_stride,
            .num_rows = params.num_rows,
            .norm_weight = params.norm_weight,
            .norm_eps = params.norm_eps,
            .epilogue = params.epilogue,
            .swiglu_limit = params.swiglu_limit,
            .output = MakeLinearOutput(params)};
  const int64_t rows_per_tile = swiglu ? kStreamRows / 2 : kStreamRows;
  const LaunchShape shape{.grid = dim3(static_cast<uint32_t>(CeilDiv(args.columns, rows_per_tile))),
                          .threads = kStreamThreads};
  return params.num_rows <= kTokensPerTile
             ? Launch(launcher, "skinny linear", SkinnyKernel<1>, shape, args)
             : Launch(launcher, "skinny linear", SkinnyKernel<2>, shape, args);
}

}  // namespace kernels::cuda

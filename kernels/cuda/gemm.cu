#include "kernels/cuda/gemm.h"

#include <algorithm>

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kRoundThreads = 256;

struct RoundArgs {
  const float* input = nullptr;
  int64_t row_stride = 0;
  int64_t columns = 0;  // a multiple of 8
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  uint16_t* out = nullptr;  // [rows, columns]
};

__device__ double SquareSum(float4 v) {
  return static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y +
         static_cast<double>(v.z) * v.z + static_cast<double>(v.w) * v.w;
}

// out <- the input, normed if there is a norm, in bf16.  One block a row, of which a thread holds
// the first kHeld values of four and reads the others twice.
__global__ void __launch_bounds__(kRoundThreads) RoundRowsKernel(RoundArgs args) {
  constexpr int32_t kHeld = 2;
  constexpr int64_t kStep = 4 * kRoundThreads;
  __shared__ double scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t begin = 4 * int64_t{threadIdx.x};
  const float* x = args.input + row * args.row_stride;
  const float* norm = args.norm_weight;
  const auto load = [&](const float* from, int64_t at) {
    return from != nullptr && at < args.columns ? *reinterpret_cast<const float4*>(from + at)
                                                : make_float4(0, 0, 0, 0);
  };
  float4 values[kHeld], norms[kHeld];
#pragma unroll
  for (int32_t i = 0; i < kHeld; ++i) norms[i] = load(norm, begin + i * kStep);
  WaitForPrevious();
#pragma unroll
  for (int32_t i = 0; i < kHeld; ++i) values[i] = load(x, begin + i * kStep);
  float inverse = 1;
  if (norm != nullptr) {
    double sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) sum += SquareSum(values[i]);
    for (int64_t at = begin + kHeld * kStep; at < args.columns; at += kStep) {
      sum += SquareSum(load(x, at));
    }
    sum = BlockSum(sum, scratch);
    inverse = static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(args.columns) + static_cast<double>(args.norm_eps)));
  }
  const auto store = [&](int64_t at, float4 v, float4 n) {
    if (at >= args.columns) return;
    if (norm != nullptr) {
      v = make_float4(v.x * inverse * n.x, v.y * inverse * n.y, v.z * inverse * n.z,
                      v.w * inverse * n.w);
    }
    *reinterpret_cast<uint2*>(args.out + row * args.columns + at) =
        make_uint2(PackBfloat16(v.x, v.y), PackBfloat16(v.z, v.w));
  };
#pragma unroll
  for (int32_t i = 0; i < kHeld; ++i) store(begin + i * kStep, values[i], norms[i]);
  for (int64_t at = begin + kHeld * kStep; at < args.columns; at += kStep) {
    store(at, load(x, at), load(norm, at));
  }
}

struct GemmArgs {
  CUtensorMap a = {};  // [rows, depth]
  CUtensorMap w = {};  // [columns, depth], with kSwiGlu gate rows, then up rows
  int32_t rows = 0;
  int64_t columns = 0;  // of the output
  int64_t depth = 0;
  float swiglu_limit = 0;
  LinearOutput output;
};

// A row's kPairs pairs of neighbouring columns, 8 apart, of one segment; `columns` are left of it.
template <int32_t kPairs>
__device__ void StorePairs(const OutputSegment& segment, const float* residual, int64_t at,
                           int64_t columns, const float (&pairs)[kPairs][2]) {
  if (segment.dtype == DType::kBfloat16) {
    uint16_t* to = static_cast<uint16_t*>(segment.data) + at;
#pragma unroll
    for (int32_t j = 0; j < kPairs; ++j) {
      if (8 * j >= columns) return;
      *reinterpret_cast<uint32_t*>(to + 8 * j) = PackBfloat16(pairs[j][0], pairs[j][1]);
    }
    return;
  }
  // The residual may be the output: everything is read before anything is written.
  float2 sums[kPairs];
#pragma unroll
  for (int32_t j = 0; j < kPairs; ++j) {
    sums[j] = make_float2(0, 0);
    if (residual != nullptr && 8 * j < columns) {
      sums[j] = *reinterpret_cast<const float2*>(residual + at + 8 * j);
    }
  }
  float* to = static_cast<float*>(segment.data) + at;
#pragma unroll
  for (int32_t j = 0; j < kPairs; ++j) {
    if (8 * j >= columns) return;
    *reinterpret_cast<float2*>(to + 8 * j) =
        make_float2(sums[j].x + pairs[j][0], sums[j].y + pairs[j][1]);
  }
}

// A row of a tile: kPairs pairs of neighbouring columns, 8 apart, the first at `column`.
template <int32_t kPairs>
__device__ void StoreRow(const LinearOutput& output, int64_t row, int64_t tile_column,
                         int64_t column, const float (&pairs)[kPairs][2]) {
  int64_t segment_column = tile_column;
  const OutputSegment* segment = FindSegment(output, segment_column);
  if (segment == nullptr) return;
  const bool is_last = segment == &output.segments[output.num_segments - 1];
  if (output.in_pairs && (is_last || segment_column + 8 * kPairs <= segment->columns)) {
    segment_column += column - tile_column;
    StorePairs(*segment, output.residual, row * segment->row_stride + segment_column,
               segment->columns - segment_column, pairs);
    return;
  }
#pragma unroll
  for (int32_t j = 0; j < kPairs; ++j) {
    Store(output, row, column + 8 * j, pairs[j][0]);
    Store(output, row, column + 8 * j + 1, pairs[j][1]);
  }
}

// Grid: as many blocks as run at a time; they take the tiles in turns, row tiles first.  With
// kSwiGlu half of a tile's columns are gate rows of the weights, half the up rows of the same
// columns.
template <int32_t kColumns, bool kSwiGlu>
__global__ void __launch_bounds__(kGemmThreads, 1)
    GemmKernel(const __grid_constant__ GemmArgs args) {
  using Thread = GemmThread<kColumns>;
  constexpr int32_t kOutputs = kSwiGlu ? kColumns / 2 : kColumns;
  Thread thread(AlignedShared<GemmShared<kColumns>>());
  const int32_t row_tiles = CeilDiv(args.rows, kGemmRows);
  const int32_t num_tiles =
      row_tiles * static_cast<int32_t>(CeilDiv(args.columns, int64_t{kOutputs}));
  const auto row_begin = [&](int32_t tile) { return tile % row_tiles * kGemmRows; };
  const auto num_rows = [&](int32_t tile) { return min(kGemmRows, args.rows - row_begin(tile)); };
  const auto column_begin = [&](int32_t tile) { return tile / row_tiles * kOutputs; };
  const int32_t first = static_cast<int32_t>(blockIdx.x);
  const int32_t step = static_cast<int32_t>(gridDim.x);
  if (thread.copies()) {
    thread.BeginCopying();
    WaitForPrevious();
    for (int32_t tile = first; tile < num_tiles; tile += step) {
      const int32_t row = row_begin(tile), column = column_begin(tile);
      const int32_t up =
          static_cast<int32_t>(args.columns) - kOutputs;  // of the up rows, less gate
      thread.Copy(
          args.depth, num_rows(tile),
          [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t r) {
            CopyBox(to, &args.a, barrier, k, row + r);
          },
          [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t c) {
            CopyBox(to, &args.w, barrier, k, column + c + (kSwiGlu && c >= kOutputs ? up : 0));
          });
    }
    return;
  }
  thread.BeginMultiplying();
  WaitForPrevious();
  for (int32_t tile = first; tile < num_tiles; tile += step) {
    float sums[Thread::kSums];
    thread.Multiply(args.depth, num_rows(tile), sums);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = thread.Row(i);
      if (row >= num_rows(tile)) continue;
      float pairs[kOutputs / 8][2];
#pragma unroll
      for (int32_t j = 0; j < kOutputs / 8; ++j) {
#pragma unroll
        for (int32_t c = 0; c < 2; ++c) {
          pairs[j][c] = sums[4 * j + 2 * i + c];
          if constexpr (kSwiGlu) {
            pairs[j][c] =
                SwiGlu(pairs[j][c], sums[Thread::kSums / 2 + 4 * j + 2 * i + c], args.swiglu_limit);
          }
        }
      }
      StoreRow(args.output, row_begin(tile) + row, column_begin(tile),
               column_begin(tile) + thread.Column(0), pairs);
    }
  }
}

int64_t NumTiles(const GemmArgs& args, int32_t outputs) {
  return CeilDiv(args.rows, kGemmRows) * CeilDiv(args.columns, int64_t{outputs});
}

template <int32_t kColumns, bool kSwiGlu>
absl::Status LaunchGemm(const Launcher& launcher, const GemmArgs& args) {
  const int64_t tiles = NumTiles(args, kSwiGlu ? kColumns / 2 : kColumns);
  return Launch(
      launcher, "gemm", GemmKernel<kColumns, kSwiGlu>,
      {.grid = dim3(static_cast<uint32_t>(std::min<int64_t>(tiles, launcher.device.num_sms))),
       .threads = kGemmThreads,
       .shared_bytes = kGemmSharedBytes<kColumns>,
       .early = true},
      args);
}

// Wide tiles read less and take 1.6 times as long, narrow ones leave fewer multiprocessors without
// work.
bool TakesWideTiles(const Launcher& launcher, const GemmArgs& args, bool swiglu) {
  const auto rounds = [&](int32_t columns) {
    return CeilDiv(NumTiles(args, swiglu ? columns / 2 : columns),
                   int64_t{launcher.device.num_sms});
  };
  return 16 * rounds(256) <= 10 * rounds(128);
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// The input is what the product takes.
bool IsPrepared(const LinearParams& params, int64_t depth) {
  return params.input.dtype == DType::kBfloat16 && params.norm_weight == nullptr &&
         CanMap({params.input.data, params.num_rows, depth, params.input.row_stride});
}

}  // namespace

bool CanRunGemm(const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  if (weight.num_parts != 1 || matrix.dtype != DType::kBfloat16 || matrix.scales != nullptr ||
      !CanMap({matrix.data, matrix.rows, matrix.cols, matrix.cols}) ||
      params.residual_in != nullptr || params.residual_out != nullptr) {
    return false;
  }
  return IsPrepared(params, matrix.cols) ||
         (params.workspace != nullptr && params.input.dtype == DType::kFloat32 &&
          params.input.row_stride % 4 == 0 && IsAligned(params.input.data) &&
          IsAligned(params.norm_weight));
}

absl::StatusOr<MatrixShape> GemmRows(const Launcher& launcher, const LinearParams& params,
                                     int64_t depth) {
  if (IsPrepared(params, depth)) {
    return MatrixShape{params.input.data, params.num_rows, depth, params.input.row_stride};
  }
  auto* rounded = reinterpret_cast<uint16_t*>(params.workspace);
  RETURN_IF_ERROR(Launch(launcher, "gemm prologue", RoundRowsKernel,
                         {.grid = dim3(static_cast<uint32_t>(params.num_rows)),
                          .threads = kRoundThreads,
                          .early = true},
                         RoundArgs{.input = static_cast<const float*>(params.input.data),
                                   .row_stride = params.input.row_stride,
                                   .columns = depth,
                                   .norm_weight = params.norm_weight,
                                   .norm_eps = params.norm_eps,
                                   .out = rounded}));
  return MatrixShape{rounded, params.num_rows, depth, depth};
}

absl::Status Gemm(const Launcher& launcher, const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  ASSIGN_OR_RETURN(const MatrixShape rows, GemmRows(launcher, params, matrix.cols));
  GemmArgs args{.rows = params.num_rows,
                .columns = swiglu ? matrix.rows / 2 : matrix.rows,
                .depth = matrix.cols,
                .swiglu_limit = params.swiglu_limit,
                .output = MakeLinearOutput(params)};
  ASSIGN_OR_RETURN(args.a, MakeTensorMap(rows));
  ASSIGN_OR_RETURN(args.w, MakeTensorMap({matrix.data, matrix.rows, matrix.cols, matrix.cols}));
  const bool wide = TakesWideTiles(launcher, args, swiglu);
  if (swiglu) return (wide ? LaunchGemm<256, true> : LaunchGemm<128, true>)(launcher, args);
  return (wide ? LaunchGemm<256, false> : LaunchGemm<128, false>)(launcher, args);
}

}  // namespace kernels::cuda

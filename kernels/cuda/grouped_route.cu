#include "kernels/cuda/grouped_route.h"

#include <cooperative_groups.h>

#include <algorithm>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kRouteThreads = 512;
constexpr int32_t kRouteWarps = kRouteThreads / kWarpSize;
constexpr int32_t kTileExperts = 64;  // whose logits a block sums at a time
constexpr int32_t kExpertTiles = kTileExperts / 8;
constexpr int32_t kLaneValues = 8;            // of a row or of a gate's row, neighbours
constexpr int32_t kStep = 4 * kLaneValues;    // of the depth, a warp's
constexpr int32_t kPitch = kTileExperts + 8;  // of partial sums in shared memory: no conflicts
constexpr int32_t kParts = 3;                 // bf16 numbers whose sum is a float32 number

struct RouteArgs {
  const float* input = nullptr;
  int64_t row_stride = 0;
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  const uint16_t* gate = nullptr;  // [experts, hidden]
  int32_t num_rows = 0;
  int64_t hidden = 0;          // a multiple of 8
  uint16_t* normed = nullptr;  // [rows, hidden]
  ExpertChoice choice;
};

// Shared memory of a block of kRows rows, each of which a warp chooses for.
template <int32_t kRows>
struct RouteShared {
  static_assert(kRows <= kRouteWarps);
  __host__ __device__ static constexpr size_t PartialBytes(int32_t num_experts) {
    const size_t partial = sizeof(float) * kRouteWarps * kRows * kPitch;
    const size_t choosing = kRows * RowShared::Bytes(num_experts);
    return partial > choosing ? partial : choosing;
  }
  __host__ __device__ static constexpr size_t Bytes(int32_t num_experts) {
    return PartialBytes(num_experts) + 2 * sizeof(float) * static_cast<size_t>(kRows * num_experts);
  }
};

// Two values -> kParts pairs of bf16 numbers, each rounded from what those before it leave.
__device__ void SplitPair(float low, float high, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (uint32_t& part : parts) {
    part = PackBfloat16(low, high);
    low -= __uint_as_float(part << 16);
    high -= __uint_as_float(part & 0xffff0000);
  }
}

// A warp's share of kRows rows' logits of 64 experts: of the steps of the depth every one that is
// kShares further on, as products of bf16 in which float32 numbers have kParts parts.  Of a tensor
// core's tile a lane (g, t) has rows g and g + 8, and of a step values 8 t to 8 t + 7, which are
// depths 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of two products.
template <int32_t kRows, int32_t kShares>
class GateSums {
 public:
  static constexpr int32_t kRowTiles = CeilDiv(kRows, 16);
  static constexpr int32_t kRowsOfTile = kRows < 16 ? 1 : 2;  // of a lane

  __device__ GateSums(const RouteArgs& args, int32_t row_begin, int32_t share)
      : args_(args), first_depth_(share * kStep + kLaneValues * t_) {
#pragma unroll
    for (int32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kRowsOfTile; ++j) {
        const int64_t row = min(row_begin + RowOf(i, j), args.num_rows - 1);
        rows_[i][j] = args.input + row * args.row_stride;
      }
    }
  }

  // Weights of the warp's first step, which do not depend on earlier kernels.
  __device__ void LoadFirst(int32_t first_expert) { LoadWeights(first_expert, first_depth_); }

  // After LoadFirst: the sums, to partial [kRows, kPitch]; with kSquares also those of the rows'
  // squares, to squares [kRows].
  template <bool kSquares>
  __device__ void Multiply(int32_t first_expert, float* partial, double* squares) {
    float sums[kRowTiles][kExpertTiles][4] = {};
    double square[kRowTiles][kRowsOfTile] = {};
    LoadRows(first_depth_);
    for (int64_t k = first_depth_; k < args_.hidden + kLaneValues * t_; k += kShares * kStep) {
      float values[kRowTiles][kRowsOfTile][kLaneValues];
      Take<kSquares>(k, values, square);
      LoadRows(k + kShares * kStep);
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
        for (int32_t i = 0; i < kRowTiles; ++i) {
          uint32_t a[4][kParts] = {};
#pragma unroll
          for (int32_t j = 0; j < kRowsOfTile; ++j) {
            const float* x = values[i][j] + 4 * half;
            SplitPair(x[0], x[1], a[j]);
            SplitPair(x[2], x[3], a[2 + j]);
          }
#pragma unroll
          for (int32_t part = kParts - 1; part >= 0; --part) {
#pragma unroll
            for (int32_t e = 0; e < kExpertTiles; ++e) {
              const uint4& w = weights_[e];
              Mma(sums[i][e], a[0][part], a[1][part], a[2][part], a[3][part], half ? w.z : w.x,
                  half ? w.w : w.y);
            }
          }
        }
      }
      LoadWeights(first_expert, k + kShares * kStep);
    }
#pragma unroll
    for (int32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kRowsOfTile; ++j) {
        const int32_t row = RowOf(i, j);
#pragma unroll
        for (int32_t e = 0; e < kExpertTiles; ++e) {
          *reinterpret_cast<float2*>(partial + row * kPitch + 8 * e + 2 * t_) =
              make_float2(sums[i][e][2 * j], sums[i][e][2 * j + 1]);
        }
        if constexpr (kSquares) {
          double sum = square[i][j];
          sum += __shfl_xor_sync(kFullWarp, sum, 1);
          sum += __shfl_xor_sync(kFullWarp, sum, 2);
          if (t_ == 0) squares[row] = sum;
        }
      }
    }
  }

 private:
  __device__ int32_t RowOf(int32_t tile, int32_t j) const { return 16 * tile + 8 * j + g_; }
  // Zeros past the end.
  __device__ void LoadRows(int64_t k) {
#pragma unroll
    for (int32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kRowsOfTile; ++j) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          next_rows_[i][j][h] = k < args_.hidden
                                    ? *reinterpret_cast<const float4*>(rows_[i][j] + k + 4 * h)
                                    : make_float4(0, 0, 0, 0);
        }
      }
    }
  }
  __device__ void LoadWeights(int32_t first_expert, int64_t k) {
#pragma unroll
    for (int32_t e = 0; e < kExpertTiles; ++e) {
      const int64_t expert = min(first_expert + 8 * e + g_, args_.choice.num_experts - 1);
      weights_[e] =
          k < args_.hidden
              ? __ldg(reinterpret_cast<const uint4*>(args_.gate + expert * args_.hidden + k))
              : make_uint4(0, 0, 0, 0);
    }
  }
  // The rows that were loaded, times the norm's weights from depth `k` on.
  template <bool kSquares>
  __device__ void Take(int64_t k, float (&values)[kRowTiles][kRowsOfTile][kLaneValues],
                       double (&square)[kRowTiles][kRowsOfTile]) const {
    float4 norm[2] = {};
#pragma unroll
    for (int32_t h = 0; h < 2 && k < args_.hidden; ++h) {
      norm[h] = __ldg(reinterpret_cast<const float4*>(args_.norm_weight + k + 4 * h));
    }
#pragma unroll
    for (int32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kRowsOfTile; ++j) {
        float sum = 0;
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          const float4 x = next_rows_[i][j][h];
          if constexpr (kSquares) {
            sum = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
          }
          float* to = values[i][j] + 4 * h;
          to[0] = x.x * norm[h].x;
          to[1] = x.y * norm[h].y;
          to[2] = x.z * norm[h].z;
          to[3] = x.w * norm[h].w;
        }
        if constexpr (kSquares) square[i][j] += sum;
      }
    }
  }

  const RouteArgs& args_;
  const int32_t g_ = static_cast<int32_t>(threadIdx.x) % kWarpSize / 4;
  const int32_t t_ = static_cast<int32_t>(threadIdx.x) % 4;
  const int64_t first_depth_;  // of the lane's values
  const float* rows_[kRowTiles][kRowsOfTile];
  float4 next_rows_[kRowTiles][kRowsOfTile][2];
  uint4 weights_[kExpertTiles];
};

// Rows [first, end) of the block's, normed and rounded, to args.normed: read again, they are near.
// The work of kThreads threads, of which this is `thread`.
template <int32_t kThreads>
__device__ void StoreNormed(const RouteArgs& args, int32_t row_begin, int32_t first, int32_t end,
                            const float* inverse, int32_t thread) {
  constexpr int32_t kRowsAtATime = 8;
  for (int64_t at = 4 * int64_t{thread}; at < args.hidden; at += 4 * kThreads) {
    const float4 n = *reinterpret_cast<const float4*>(args.norm_weight + at);
    for (int32_t begin = first; begin < end; begin += kRowsAtATime) {
      float4 x[kRowsAtATime];
#pragma unroll
      for (int32_t r = 0; r < kRowsAtATime; ++r) {
        const int64_t row = min(row_begin + begin + r, args.num_rows - 1);
        x[r] = *reinterpret_cast<const float4*>(args.input + row * args.row_stride + at);
      }
#pragma unroll
      for (int32_t r = 0; r < kRowsAtATime; ++r) {
        const int64_t row = row_begin + begin + r;
        if (begin + r >= end || row >= args.num_rows) break;
        const float scale = inverse[begin + r];
        *reinterpret_cast<uint2*>(args.normed + row * args.hidden + at) =
            make_uint2(PackBfloat16(x[r].x * scale * n.x, x[r].y * scale * n.y),
                       PackBfloat16(x[r].z * scale * n.z, x[r].w * scale * n.w));
      }
    }
  }
}

// A cluster takes kRows rows: its blocks' warps share the depth; then a block has its share of the
// rows, one warp each to choose and the others to norm.  Shared: partial sums, later what choosing
// needs; the logits.
template <int32_t kRows, int32_t kBlocks>
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kRouteThreads, 1)
    RouteKernel(const __grid_constant__ MoeParams params, const __grid_constant__ RouteArgs args) {
  constexpr int32_t kOwnRows = kRows / kBlocks;
  static_assert(kOwnRows * kBlocks == kRows && kOwnRows <= kRouteWarps);
  __shared__ double squares[kRouteWarps][kRows];
  __shared__ double square_sums[kRows];
  __shared__ float inverse[kRows];
  const int32_t num_experts = args.choice.num_experts;
  auto* partial = reinterpret_cast<float*>(DynamicShared());  // [kRouteWarps, kRows, kPitch]
  auto* sums = reinterpret_cast<float*>(DynamicShared() +     // [kRows, num_experts]
                                        RouteShared<kRows>::PartialBytes(num_experts));
  float* logits = sums + kRows * num_experts;  // [kOwnRows, num_experts]
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) % kBlocks;
  const int32_t row_begin = static_cast<int32_t>(blockIdx.x) / kBlocks * kRows;
  GateSums<kRows, kRouteWarps * kBlocks> gate_sums(args, row_begin, rank * kRouteWarps + warp);
  for (int32_t first = 0; first < num_experts; first += kTileExperts) {
    float* of_warp = partial + warp * kRows * kPitch;
    gate_sums.LoadFirst(first);
    if (first == 0) {
      WaitForPrevious();
      gate_sums.template Multiply<true>(first, of_warp, squares[warp]);
    } else {
      gate_sums.template Multiply<false>(first, of_warp, nullptr);
    }
    __syncthreads();
    if (first == 0 && threadIdx.x < kRows) {
      double sum = 0;
      for (int32_t w = 0; w < kRouteWarps; ++w) sum += squares[w][threadIdx.x];
      square_sums[threadIdx.x] = sum;
    }
    for (int32_t i = threadIdx.x; i < kRows * kTileExperts; i += kRouteThreads) {
      const int32_t row = i / kTileExperts, expert = i % kTileExperts;
      float sum = 0;
#pragma unroll
      for (int32_t w = 0; w < kRouteWarps; ++w) sum += partial[(w * kRows + row) * kPitch + expert];
      if (first + expert < num_experts) sums[row * num_experts + first + expert] = sum;
    }
    __syncthreads();
  }
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (kBlocks > 1) cluster.sync();
  const int32_t first_row = rank * kOwnRows;
  if (threadIdx.x < kOwnRows) {
    const int32_t row = first_row + static_cast<int32_t>(threadIdx.x);
    double sum = 0;
    for (int32_t b = 0; b < kBlocks; ++b) sum += *cluster.map_shared_rank(&square_sums[row], b);
    inverse[row] = static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(args.hidden) + static_cast<double>(args.norm_eps)));
  }
  __syncthreads();
  constexpr int32_t kChoosers = kOwnRows * 2 <= kRouteWarps ? kOwnRows : 0;
  if (warp >= kChoosers) {
    StoreNormed<kRouteThreads - kChoosers * kWarpSize>(
        args, row_begin, first_row, first_row + kOwnRows, inverse,
        static_cast<int32_t>(threadIdx.x) - kChoosers * kWarpSize);
  }
  if (warp < kOwnRows && row_begin + first_row + warp < args.num_rows) {
    const int32_t row = first_row + warp;
    float* own = logits + warp * num_experts;
    for (int32_t e = static_cast<int32_t>(threadIdx.x) % kWarpSize; e < num_experts;
         e += kWarpSize) {
      float sum = 0;
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
        sum += *cluster.map_shared_rank(&sums[row * num_experts + e], b);
      }
      own[e] = sum * inverse[row];
    }
    __syncwarp();
    ChooseExperts(params, row_begin + row, own, RowShared(DynamicShared(), warp, num_experts),
                  args.choice.ids, args.choice.weights);
  }
  if constexpr (kBlocks > 1) cluster.sync();  // nobody goes while its sums are read
}

template <int32_t kRows, int32_t kBlocks>
absl::Status LaunchRoute(const Launcher& launcher, const MoeParams& params, const RouteArgs& args) {
  return Launch(launcher, "moe route", RouteKernel<kRows, kBlocks>,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(args.num_rows, kRows) * kBlocks)),
                 .threads = kRouteThreads,
                 .shared_bytes = RouteShared<kRows>::Bytes(args.choice.num_experts),
                 .early = true},
                params, args);
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool CanRouteGroups(const MoeParams& params, int64_t hidden, const MatrixStack& gate_weight) {
  return gate_weight.num_parts == 1 && gate_weight.parts[0].dtype == DType::kBfloat16 &&
         gate_weight.parts[0].scales == nullptr && params.input_row_stride % 4 == 0 &&
         IsAligned(params.input) && IsAligned(params.norm_weight) && hidden % 8 == 0;
}

absl::Status RouteGroups(const Launcher& launcher, const MoeParams& params, int64_t hidden,
                         const MatrixStack& gate_weight, uint16_t* normed,
                         const ExpertChoice& choice) {
  const RouteArgs args{.input = params.input,
                       .row_stride = params.input_row_stride,
                       .norm_weight = params.norm_weight,
                       .norm_eps = params.norm_eps,
                       .gate = static_cast<const uint16_t*>(gate_weight.parts[0].data),
                       .num_rows = params.num_rows,
                       .hidden = hidden,
                       .normed = normed,
                       .choice = choice};
  // Few rows a block while a multiprocessor has at most one, and few of the depth while there are
  // as many multiprocessors; many rows read the gate less often, and with very many experts do not
  // fit.
  constexpr int32_t kManyExperts = 512;
  constexpr int32_t kCluster = 4;
  if (kCluster * CeilDiv(params.num_rows, 8) <= launcher.device.num_sms) {
    return LaunchRoute<8, kCluster>(launcher, params, args);
  }
  return params.num_rows <= 8 * launcher.device.num_sms || choice.num_experts > kManyExperts
             ? LaunchRoute<8, 1>(launcher, params, args)
             : LaunchRoute<16, 1>(launcher, params, args);
}

}  // namespace kernels::cuda

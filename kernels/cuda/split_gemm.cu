#include "kernels/cuda/split_gemm.h"

#include <cooperative_groups.h>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/tensor_map.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kColumns = 128;  // of a tile
constexpr int32_t kMultipliers = kGemmWarps * kWarpSize;
constexpr int32_t kThreads = kMultipliers + kWarpSize;  // the last warp copies
// A tile's sums in shared memory: eight lanes that write a column of pairs meet different banks.
constexpr int32_t kTileStride = kColumns + 8;
static_assert(sizeof(float) * kGemmRows * kTileStride <=
              sizeof(GemmShared<kColumns>::a) + sizeof(GemmShared<kColumns>::w));

struct Args {
  CUtensorMap a = {};  // [rows, depth]
  CUtensorMap w = {};  // [columns, depth]
  int32_t rows = 0;    // at most kGemmRows
  int32_t steps = 0;   // of kGemmDepth
  LinearOutput output;
};

__device__ void SyncMultipliers() {
  asm volatile("bar.sync 1, %0;" : : "n"(kMultipliers) : "memory");
}

// A cluster a tile of columns, a block a range of its depth.
template <int32_t kSplits>
__global__ void __cluster_dims__(kSplits) __launch_bounds__(kThreads, 1)
    SplitGemmKernel(const __grid_constant__ Args args) {
  auto& shared = AlignedShared<GemmShared<kColumns>>();
  if (threadIdx.x == kMultipliers) {
    PrefetchMap(&args.w);
    PrefetchMap(&args.a);
  }
  GemmThread<kColumns> thread(shared);
  const auto cluster = cooperative_groups::this_cluster();
  const auto split = static_cast<int32_t>(cluster.block_rank());
  const int32_t column = static_cast<int32_t>(blockIdx.x) / kSplits * kColumns;
  const int32_t begin = args.steps * split / kSplits * kGemmDepth;
  const int32_t depth = args.steps * (split + 1) / kSplits * kGemmDepth - begin;
  WaitForPrevious();
  if (thread.copies()) {
    thread.Copy(
        depth, args.rows,
        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t r) {
          CopyBox(to, &args.a, barrier, begin + k, r);
        },
        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t c) {
          CopyBox(to, &args.w, barrier, begin + k, column + c);
        });
    return;
  }
  // The block adds a range of the tile's columns, in pairs; a thread every kMultipliers-th.
  constexpr int32_t kPairs = kColumns / kSplits / 2;  // of a row
  constexpr int32_t kThreadPairs = kGemmRows * kPairs / kMultipliers;
  const int32_t thread_column = 2 * (split * kPairs + static_cast<int32_t>(threadIdx.x) % kPairs);
  const auto row_of = [&](int32_t i) {
    return static_cast<int32_t>(threadIdx.x) / kPairs + i * (kMultipliers / kPairs);
  };
  // The residual may be the output: a thread reads what it will write.
  float2 totals[kThreadPairs];
#pragma unroll
  for (int32_t i = 0; i < kThreadPairs; ++i) {
    totals[i] =
        LoadResidualPair(args.output, min(row_of(i), args.rows - 1), column + thread_column);
  }
  float sums[GemmThread<kColumns>::kSums];
  thread.Multiply(depth, args.rows, sums);
  SyncMultipliers();  // all have read their operands, whose memory takes the sums
  auto* tile = reinterpret_cast<float*>(shared.a);
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns / 8; ++j) {
      *reinterpret_cast<float2*>(tile + thread.Row(i) * kTileStride + thread.Column(j)) =
          make_float2(sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
    }
  }
  cluster.sync();
#pragma unroll
  for (int32_t i = 0; i < kThreadPairs; ++i) {
    if (row_of(i) >= args.rows) continue;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int32_t s = 0; s < kSplits; ++s) {
      const float2 part = *reinterpret_cast<const float2*>(
          cluster.map_shared_rank(tile + row_of(i) * kTileStride + thread_column, s));
      sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    totals[i] = make_float2(sum.x + totals[i].x, sum.y + totals[i].y);
  }
#pragma unroll
  for (int32_t i = 0; i < kThreadPairs; ++i) {
    if (row_of(i) < args.rows) {
      StorePair(args.output, row_of(i), column + thread_column, totals[i]);
    }
  }
  cluster.sync();  // nobody goes while its sums are read
}

// How many blocks share a tile; 1: the depth is not cut.  More than four exchange more than they
// spare each other, and not as many clusters run at once as multiprocessors would hold.
int32_t NumSplits(const Launcher& launcher, const StoredMatrix& matrix) {
  const int64_t tiles = CeilDiv(matrix.rows, int64_t{kColumns});
  const int64_t steps = CeilDiv(matrix.cols, int64_t{kGemmDepth});
  const int64_t blocks = int64_t{launcher.device.num_sms} * 9 / 10;
  for (const int32_t splits : {4, 2}) {
    if (tiles * splits <= blocks && steps >= 2 * splits) return splits;
  }
  return 1;
}

}  // namespace

bool CanSplitGemm(const Launcher& launcher, const LinearParams& params, const MatrixStack& weight) {
  return CanRunGemm(params, weight) && params.num_rows <= kGemmRows &&
         params.epilogue != LinearEpilogue::kSwiGlu && NumSplits(launcher, weight.parts[0]) > 1;
}

absl::Status SplitGemm(const Launcher& launcher, const LinearParams& params,
                       const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  ASSIGN_OR_RETURN(const MatrixShape rows, GemmRows(launcher, params, matrix.cols));
  Args args{.rows = params.num_rows,
            .steps = static_cast<int32_t>(CeilDiv(matrix.cols, int64_t{kGemmDepth})),
            .output = MakeLinearOutput(params)};
  ASSIGN_OR_RETURN(args.a, MakeTensorMap(rows));
  ASSIGN_OR_RETURN(args.w, MakeTensorMap({matrix.data, matrix.rows, matrix.cols, matrix.cols}));
  const int32_t splits = NumSplits(launcher, matrix);
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(CeilDiv(matrix.rows, int64_t{kColumns}) * splits)),
      .threads = kThreads,
      .shared_bytes = kGemmSharedBytes<kColumns>,
      .early = true};
  return Launch(launcher, "split gemm", splits == 4 ? SplitGemmKernel<4> : SplitGemmKernel<2>,
                shape, args);
}

}  // namespace kernels::cuda

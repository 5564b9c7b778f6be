#include "kernels/cuda/hyper_mix.h"

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kStreams = 4;
constexpr int32_t kMixes = kStreams * (2 + kStreams);
// A cluster's blocks share rows: each has a slice of every stream's columns, so that it reads them
// once for the mixes and for the block's input.
constexpr int32_t kCluster = 8;
constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kMaxRows = 8;       // of a cluster
constexpr int32_t kSums = kWarpSize;  // of a thread, of which a lane has one in the end
// Mixes that are summed at a time, for all rows.
constexpr int32_t MixesAtOnce(int32_t rows) { return rows <= 2 ? kMixes / rows : kSums / rows; }

struct HyperMixArgs {
  HyperPreParams params;
  const float* fn;  // [num_mixes, kStreams * hidden_size]
  int32_t num_mixes;
};

template <int32_t kRows>
struct alignas(16) Shared {
  // Sums of squares and, behind them, of mixes: of each warp, of this block, of the cluster.
  static constexpr int32_t kAll = (1 + kMixes) * kRows;
  float of_warp[kWarps][kAll];
  float of_block[kAll];
  float total[kAll];
  float pre[kRows][kStreams];
  float base[kMixes];
  float scale[3];
};

__device__ float Dot(float sum, float4 a, float4 b) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// Half of the sums move to each half of the lanes, and so on; lane l gets sums[l] of all lanes
// together, added in the same order whatever l is.
template <int32_t kHalf = kSums / 2>
__device__ float SumOfLane(float (&sums)[kSums]) {
  const bool upper = (threadIdx.x & static_cast<uint32_t>(kHalf)) != 0;
#pragma unroll
  for (int32_t i = 0; i < kHalf; ++i) {
    const float low = sums[i], high = sums[i + kHalf];
    sums[i] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, kHalf);
  }
  if constexpr (kHalf > 1) {
    return SumOfLane<kHalf / 2>(sums);
  } else {
    return sums[0];
  }
}

__device__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// To a unit or two of the last place.
__device__ float Inverse(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// Doubly stochastic from its logits (models.md 7.2): four lanes have a row each, all groups of four
// lanes the same.
__device__ void Sinkhorn(float (&row)[kStreams], int32_t iterations, float eps) {
  const auto sum_of_row = [&] { return (row[0] + row[1]) + (row[2] + row[3]); };
  const float max = fmaxf(fmaxf(row[0], row[1]), fmaxf(row[2], row[3]));
#pragma unroll
  for (int32_t k = 0; k < kStreams; ++k) row[k] = expf(row[k] - max);
  const float inverse = Inverse(sum_of_row());
#pragma unroll
  for (int32_t k = 0; k < kStreams; ++k) row[k] = row[k] * inverse + eps;
  for (int32_t i = 0; i < iterations; ++i) {
    const float of_row = i == 0 ? 1.0f : Inverse(sum_of_row() + eps);
#pragma unroll
    for (int32_t k = 0; k < kStreams; ++k) {
      row[k] *= of_row;
      float sum = row[k];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      row[k] *= Inverse(sum + eps);
    }
  }
}

// Grid: clusters of kCluster blocks, each for kRows rows.
template <int32_t kRows>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, kRows == kMaxRows ? 2 : 1)
    HyperMixKernel(const __grid_constant__ HyperMixArgs args) {
  using S = Shared<kRows>;
  constexpr int32_t kAtOnce = MixesAtOnce(kRows);
  const HyperPreParams& params = args.params;
  auto& shared = *reinterpret_cast<S*>(DynamicShared());
  auto* x = reinterpret_cast<float4*>(&shared + 1);  // [kRows][kStreams][slice]
  const auto rank = static_cast<int32_t>(blockIdx.x) % kCluster;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / kCluster * kRows;
  const int32_t num_rows = min(kRows, params.num_rows - first_row);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  // In vectors of four values: a stream of a row, and this block's slice of it.
  const auto stream_size = static_cast<int32_t>(params.hidden_size / 4);
  const int32_t slice = stream_size / kCluster;
  const int32_t size = kStreams * slice;
  const auto place = [&](int32_t v) { return v / slice * stream_size + rank * slice + v % slice; };
  const auto* fn = reinterpret_cast<const float4*>(args.fn);
  // Weights of `kAtOnce` mixes at vector v.
  const auto load_weights = [&](float4(&weights)[kAtOnce], int32_t first, int32_t v) {
    const float4* from = fn + int64_t{first} * kStreams * stream_size + place(v);
#pragma unroll
    for (int32_t m = 0; m < kAtOnce; ++m) {
      const bool exists = v < size && first + m < args.num_mixes;
      weights[m] = exists ? __ldg(from + m * kStreams * stream_size) : make_float4(0, 0, 0, 0);
    }
  };
  float4 weights[kAtOnce];  // the first ones come while the kernel before ends
  load_weights(weights, 0, thread);
  if (thread < args.num_mixes) shared.base[thread] = params.base[thread];
  if (thread < (params.post == nullptr ? 1 : 3)) shared.scale[thread] = params.scale[thread];
  WaitForPrevious();
  const auto* streams =
      reinterpret_cast<const float4*>(params.streams) + int64_t{first_row} * kStreams * stream_size;
  // A thread reads what it wrote until the block's input.
  float squares[kRows] = {};
  for (int32_t v = thread; v < size; v += kThreads) {
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      float4 values = make_float4(0, 0, 0, 0);
      if (r < num_rows) values = __ldcg(streams + int64_t{r} * kStreams * stream_size + place(v));
      squares[r] = Dot(squares[r], values, values);
      x[r * size + v] = values;
    }
  }
#pragma unroll
  for (int32_t r = 0; r < kRows; ++r) {
    squares[r] = WarpSum(squares[r]);
    if (lane == 0) shared.of_warp[warp][r] = squares[r];
  }
  for (int32_t first = 0; first < args.num_mixes; first += kAtOnce) {
    float sums[kSums] = {};
    for (int32_t v = thread; v < size; v += kThreads) {
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
        const float4 values = x[r * size + v];
#pragma unroll
        for (int32_t m = 0; m < kAtOnce; ++m) {
          sums[m * kRows + r] = Dot(sums[m * kRows + r], weights[m], values);
        }
      }
      const bool more = v + kThreads < size;
      load_weights(weights, more ? first : first + kAtOnce, more ? v + kThreads : thread);
    }
    const float sum = SumOfLane(sums);
    const int32_t at = (1 + first) * kRows + lane;
    if (lane < kAtOnce * kRows && at < S::kAll) shared.of_warp[warp][at] = sum;
  }
  __syncthreads();
  const int32_t num_sums = (1 + args.num_mixes) * kRows;
  for (int32_t i = thread; i < num_sums; i += kThreads) {
    float sum = 0;
    for (int32_t w = 0; w < kWarps; ++w) sum += shared.of_warp[w][i];
    shared.of_block[i] = sum;
  }
  ClusterBarrier();
  for (int32_t i = thread; i < num_sums; i += kThreads) {
    float sum = 0;
#pragma unroll
    for (uint32_t block = 0; block < kCluster; ++block) {
      sum += __uint_as_float(
          LoadFromRank(reinterpret_cast<const uint32_t*>(&shared.of_block[i]), block));
    }
    shared.total[i] = sum;
  }
  __syncthreads();
  const auto mix = [&](int32_t row, int32_t i, int32_t kind) {
    const float mean = shared.total[row] / static_cast<float>(kStreams * params.hidden_size);
    return shared.total[(1 + i) * kRows + row] * (1.0f / sqrtf(mean + params.norm_eps)) *
               shared.scale[kind] +
           shared.base[i];
  };
  if (thread < kRows * kStreams) {
    const int32_t row = thread / kStreams, stream = thread % kStreams;
    shared.pre[row][stream] = Sigmoid(mix(row, stream, 0)) + params.eps;
  }
  __syncthreads();
  // Rows' mixes back are divided among the blocks, and are the last warp's work.
  if (warp == kWarps - 1 && params.post != nullptr) {
    for (int32_t row = rank; row < num_rows; row += kCluster) {
      const int32_t stream = lane % kStreams;
      float comb[kStreams];
#pragma unroll
      for (int32_t k = 0; k < kStreams; ++k) {
        comb[k] = mix(row, (2 + stream) * kStreams + k, 2);
      }
      Sinkhorn(comb, params.sinkhorn_iters, params.eps);
      if (lane >= kStreams) continue;
      const int64_t at = int64_t{first_row + row} * kStreams + stream;
      params.post[at] = 2 * Sigmoid(mix(row, kStreams + stream, 1));
#pragma unroll
      for (int32_t k = 0; k < kStreams; ++k) params.comb[at * kStreams + k] = comb[k];
    }
  }
  for (int32_t v = thread; v < num_rows * slice; v += kThreads) {
    const int32_t row = v / slice, column = v % slice;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int32_t j = 0; j < kStreams; ++j) {
      const float4 values = x[row * size + j * slice + column];
      const float pre = shared.pre[row][j];
      sum.x += pre * values.x;
      sum.y += pre * values.y;
      sum.z += pre * values.z;
      sum.w += pre * values.w;
    }
    reinterpret_cast<float4*>(
        params.output)[int64_t{first_row + row} * stream_size + rank * slice + column] = sum;
  }
  ClusterBarrier();  // nobody leaves while another block may read its sums
}

template <int32_t kRows>
size_t SharedBytes(const HyperPreParams& params) {
  return sizeof(Shared<kRows>) +
         sizeof(float) * kRows * kStreams * static_cast<size_t>(params.hidden_size) / kCluster;
}

template <int32_t kRows>
absl::Status Run(const Launcher& launcher, const HyperMixArgs& args) {
  const int32_t clusters = CeilDiv(args.params.num_rows, kRows);
  return Launch(launcher, "hyper_pre", HyperMixKernel<kRows>,
                {.grid = dim3(static_cast<uint32_t>(clusters * kCluster)),
                 .threads = kThreads,
                 .shared_bytes = SharedBytes<kRows>(args.params),
                 .early = true},
                args);
}

const StoredMatrix* FloatMatrix(const HyperPreParams& params) {
  const MatrixStack& stack = static_cast<const CudaPackedLinear&>(*params.fn).stack();
  const StoredMatrix& matrix = stack.parts[0];
  const bool is_float = stack.num_parts == 1 && matrix.dtype == DType::kFloat32;
  return is_float && matrix.scales == nullptr ? &matrix : nullptr;
}

}  // namespace

bool CanRunHyperMix(const HyperPreParams& params) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return params.num_streams == kStreams && params.hidden_size % (4 * kCluster) == 0 &&
         SharedBytes<kMaxRows>(params) <= kMaxSharedBytes && FloatMatrix(params) != nullptr &&
         aligned(params.streams) && aligned(params.output);
}

absl::Status HyperMix(const Launcher& launcher, const HyperPreParams& params) {
  const HyperMixArgs args{.params = params,
                          .fn = static_cast<const float*>(FloatMatrix(params)->data),
                          .num_mixes = static_cast<int32_t>(params.fn->out_features())};
  // As few rows a cluster as all clusters run at once with.
  constexpr int32_t kClusters = 8;
  if (params.num_rows <= kClusters) return Run<1>(launcher, args);
  if (params.num_rows <= 2 * kClusters) return Run<2>(launcher, args);
  if (params.num_rows <= 4 * kClusters) return Run<4>(launcher, args);
  return Run<kMaxRows>(launcher, args);
}

}  // namespace kernels::cuda

#include "kernels/cuda/hyper_connection.h"

#include "kernels/cuda/hyper_mix.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

struct CollapseArgs {
  const float* streams;
  const float* base;
  const float* scale;
  const float* mixes;  // [num_rows, num_mixes]
  float* output;
  float* post;  // null: collapse only
  float* comb;
  int64_t hidden_size;
  int32_t num_streams;
  int32_t num_mixes;
  int32_t sinkhorn_iters;
  float norm_eps;
  float eps;
};

__device__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// comb [n, n] in shared memory from its logits, in place (models.md 7.2); a warp's work, lane j at
// row and column j.
__device__ void Sinkhorn(int32_t n, int32_t iterations, float eps, float* comb) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  float* row = comb + lane * n;
  if (lane < n) {
    float max = row[0];
    for (int32_t k = 1; k < n; ++k) max = row[k] > max ? row[k] : max;
    float sum = 0;
    for (int32_t k = 0; k < n; ++k) sum += row[k] = expf(row[k] - max);
    for (int32_t k = 0; k < n; ++k) row[k] = row[k] / sum + eps;
  }
  __syncwarp();
  for (int32_t i = 0; i < iterations; ++i) {
    if (i > 0 && lane < n) {
      float sum = 0;
      for (int32_t k = 0; k < n; ++k) sum += row[k];
      for (int32_t k = 0; k < n; ++k) row[k] /= sum + eps;
    }
    __syncwarp();
    if (lane < n) {
      float sum = 0;
      for (int32_t j = 0; j < n; ++j) sum += comb[j * n + lane];
      for (int32_t j = 0; j < n; ++j) comb[j * n + lane] /= sum + eps;
    }
    __syncwarp();
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) CollapseKernel(CollapseArgs args) {
  __shared__ double scratch[33];
  __shared__ float pre[kMaxStreams];
  __shared__ float comb[kMaxStreams * kMaxStreams];
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  const int32_t n = args.num_streams;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int64_t size = n * args.hidden_size;
  const float* streams = args.streams + row * size;
  double sum = 0;
  for (int64_t i = thread; i < size; i += kThreads) {
    sum += static_cast<double>(streams[i]) * streams[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(size) + static_cast<double>(args.norm_eps)));
  const float* mixes = args.mixes + row * args.num_mixes;
  const auto mix = [&](int32_t i, int32_t kind) {
    return mixes[i] * inverse * args.scale[kind] + args.base[i];
  };
  if (thread < n) pre[thread] = Sigmoid(mix(thread, 0)) + args.eps;
  if (args.post != nullptr && thread < kWarpSize) {
    if (thread < n) args.post[row * n + thread] = 2 * Sigmoid(mix(n + thread, 1));
    for (int32_t i = thread; i < n * n; i += kWarpSize) comb[i] = mix(2 * n + i, 2);
    __syncwarp();
    Sinkhorn(n, args.sinkhorn_iters, args.eps, comb);
    for (int32_t i = thread; i < n * n; i += kWarpSize) args.comb[row * n * n + i] = comb[i];
  }
  __syncthreads();
  float* out = args.output + row * args.hidden_size;
  for (int64_t i = thread; i < args.hidden_size; i += kThreads) {
    float value = pre[0] * streams[i];
    for (int32_t j = 1; j < n; ++j) value += pre[j] * streams[j * args.hidden_size + i];
    out[i] = value;
  }
}

// Grid: columns, rows.
__global__ void __launch_bounds__(kThreads) HyperPostKernel(HyperPostParams params) {
  WaitForPrevious();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= params.hidden_size) return;
  const int64_t row = blockIdx.y;
  const int32_t n = params.num_streams;
  const float y = params.block_output[row * params.hidden_size + column];
  const float* post = params.post + row * n;
  const float* comb = params.comb + row * n * n;
  float* streams = params.streams + row * n * params.hidden_size + column;
  float before[kMaxStreams];
#pragma unroll
  for (int32_t j = 0; j < kMaxStreams; ++j) {
    if (j < n) before[j] = streams[j * params.hidden_size];
  }
  for (int32_t k = 0; k < n; ++k) {
    float sum = post[k] * y;
#pragma unroll
    for (int32_t j = 0; j < kMaxStreams; ++j) {
      if (j < n) sum += comb[j * n + k] * before[j];
    }
    streams[k * params.hidden_size] = sum;
  }
}

}  // namespace

absl::Status HyperPre(const Launcher& launcher, const HyperPreParams& params) {
  RETURN_IF_ERROR(CheckHyperPre(params));
  if (params.num_rows == 0) return absl::OkStatus();
  if (CanRunHyperMix(params)) return HyperMix(launcher, params);
  const int64_t num_mixes = params.fn->out_features();
  const OutputSegment output = {params.mixes, num_mixes, num_mixes};
  RETURN_IF_ERROR(Linear(launcher, {.weight = params.fn,
                                    .num_rows = params.num_rows,
                                    .input = {.data = const_cast<float*>(params.streams),
                                              .row_stride = params.fn->in_features()},
                                    .outputs = absl::MakeConstSpan(&output, 1)}));
  const CollapseArgs args{.streams = params.streams,
                          .base = params.base,
                          .scale = params.scale,
                          .mixes = params.mixes,
                          .output = params.output,
                          .post = params.post,
                          .comb = params.comb,
                          .hidden_size = params.hidden_size,
                          .num_streams = params.num_streams,
                          .num_mixes = static_cast<int32_t>(num_mixes),
                          .sinkhorn_iters = params.sinkhorn_iters,
                          .norm_eps = params.norm_eps,
                          .eps = params.eps};
  return Launch(
      launcher, "hyper_pre", CollapseKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      args);
}

absl::Status HyperPost(const Launcher& launcher, const HyperPostParams& params) {
  RETURN_IF_ERROR(CheckHyperPost(params));
  const auto columns = static_cast<uint32_t>(CeilDiv(params.hidden_size, int64_t{kThreads}));
  return Launch(launcher, "hyper_post", HyperPostKernel,
                {.grid = dim3(columns, static_cast<uint32_t>(params.num_rows)),
                 .threads = kThreads,
                 .early = true},
                params);
}

}  // namespace kernels::cuda

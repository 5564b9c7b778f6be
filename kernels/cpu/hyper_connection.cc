#include "kernels/cpu/hyper_connection.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/linear.h"
#include "kernels/cpu/rms_norm.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// comb [n, n] from its logits, in place (models.md 7.2).
void Sinkhorn(int32_t n, int32_t iterations, float eps, float* comb) {
  for (int32_t j = 0; j < n; ++j) {
    float* row = comb + j * n;
    const float max = *std::max_element(row, row + n);
    float sum = 0;
    for (int32_t k = 0; k < n; ++k) sum += row[k] = std::exp(row[k] - max);
    for (int32_t k = 0; k < n; ++k) row[k] = row[k] / sum + eps;
  }
  for (int32_t i = 0; i < iterations; ++i) {
    for (int32_t j = 0; i > 0 && j < n; ++j) {
      float* row = comb + j * n;
      float sum = 0;
      for (int32_t k = 0; k < n; ++k) sum += row[k];
      for (int32_t k = 0; k < n; ++k) row[k] /= sum + eps;
    }
    for (int32_t k = 0; k < n; ++k) {
      float sum = 0;
      for (int32_t j = 0; j < n; ++j) sum += comb[j * n + k];
      for (int32_t j = 0; j < n; ++j) comb[j * n + k] /= sum + eps;
    }
  }
}

void CollapseRow(const HyperPreParams& params, int64_t row) {
  const int32_t n = params.num_streams;
  const int64_t hidden = params.hidden_size;
  const float* streams = params.streams + row * n * hidden;
  const float inverse = InverseRms(streams, params.norm_eps, n * hidden);
  const float* mixes = params.mixes + row * params.fn->out_features();
  const auto mix = [&](int32_t i, int32_t kind) {
    return mixes[i] * inverse * params.scale[kind] + params.base[i];
  };
  float pre[kMaxStreams];
  for (int32_t j = 0; j < n; ++j) pre[j] = Sigmoid(mix(j, 0)) + params.eps;
  if (params.post != nullptr) {
    float* comb = params.comb + row * n * n;
    for (int32_t k = 0; k < n; ++k) params.post[row * n + k] = 2 * Sigmoid(mix(n + k, 1));
    for (int32_t i = 0; i < n * n; ++i) comb[i] = mix(2 * n + i, 2);
    Sinkhorn(n, params.sinkhorn_iters, params.eps, comb);
  }
  float* out = params.output + row * hidden;
  for (int64_t i = 0; i < hidden; ++i) out[i] = pre[0] * streams[i];
  for (int32_t j = 1; j < n; ++j) {
    for (int64_t i = 0; i < hidden; ++i) out[i] += pre[j] * streams[j * hidden + i];
  }
}

}  // namespace

absl::Status HyperPre(ThreadPool& pool, const HyperPreParams& params) {
  RETURN_IF_ERROR(CheckHyperPre(params));
  const int64_t mixes = params.fn->out_features();
  const OutputSegment output = {params.mixes, mixes, mixes};
  RETURN_IF_ERROR(Linear(pool, {.weight = params.fn,
                                .num_rows = params.num_rows,
                                .input = {.data = const_cast<float*>(params.streams),
                                          .row_stride = params.fn->in_features()},
                                .outputs = {&output, 1}}));
  pool.ParallelFor(params.num_rows, [&](int64_t row) { CollapseRow(params, row); });
  return absl::OkStatus();
}

absl::Status HyperPost(ThreadPool& pool, const HyperPostParams& params) {
  RETURN_IF_ERROR(CheckHyperPost(params));
  const int32_t n = params.num_streams;
  const int64_t hidden = params.hidden_size;
  pool.ParallelFor(params.num_rows, [&](int64_t row) {
    float* streams = params.streams + row * n * hidden;
    const float* y = params.block_output + row * hidden;
    const float* post = params.post + row * n;
    const float* comb = params.comb + row * n * n;
    for (int64_t i = 0; i < hidden; ++i) {
      float before[kMaxStreams];
      for (int32_t j = 0; j < n; ++j) before[j] = streams[j * hidden + i];
      for (int32_t k = 0; k < n; ++k) {
        float sum = post[k] * y[i];
        for (int32_t j = 0; j < n; ++j) sum += comb[j * n + k] * before[j];
        streams[k * hidden + i] = sum;
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

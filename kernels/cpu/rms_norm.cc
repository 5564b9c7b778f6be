#include "kernels/cpu/rms_norm.h"

#include <cmath>

namespace kernels::cpu {

float InverseRms(const float* x, float eps, int64_t n) {
  constexpr int kLanes = 8;  // independent sums, so that the loop vectorises without reordering
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = x[i + lane];
      sums[lane] += value * value;
    }
  }
  double sum = 0;
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  for (const double lane_sum : sums) sum += lane_sum;
  return static_cast<float>(1.0 /
                            std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
}

void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const float inverse = InverseRms(x, eps, n);
  for (int64_t j = 0; j < n; ++j) out[j] = x[j] * inverse * weight[j];
}

}  // namespace kernels::cpu

// RMS norm of one row: out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i].

#ifndef KERNELS_CPU_RMS_NORM_H_
#define KERNELS_CPU_RMS_NORM_H_

#include <cstdint>

namespace kernels::cpu {

// 1 / sqrt(mean(x^2) + eps).  The sum runs in a fixed order in double.
float InverseRms(const float* x, float eps, int64_t n);

// `out` may be `x`.
void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* out);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_RMS_NORM_H_

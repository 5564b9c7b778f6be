// Linear over fp8 weights for more rows than stream (skinny_linear.h): activations rounded to bf16,
// weights exact (quantized_products.h).  A sibling of linear.cu's general product, for devices that
// may round activations to bf16.

#ifndef KERNELS_CUDA_QUANTIZED_LINEAR_H_
#define KERNELS_CUDA_QUANTIZED_LINEAR_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/linear.h"

namespace kernels::cuda {

bool CanRunQuantized(const LinearParams& params, const MatrixStack& weight);

// REQUIRES: CanRunQuantized, CheckLinear is OK.
absl::Status QuantizedLinear(const Launcher& launcher, const LinearParams& params,
                             const MatrixStack& weight);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_QUANTIZED_LINEAR_H_

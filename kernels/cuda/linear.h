// Linear and HeadLinear on CUDA: contracts in kernels/linear.h.

#ifndef KERNELS_CUDA_LINEAR_H_
#define KERNELS_CUDA_LINEAR_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/linear.h"

namespace kernels::cuda {

class CudaPackedLinear final : public PackedLinear {
 public:
  CudaPackedLinear(const MatrixStack& stack, std::unique_ptr<DeviceBuffer> memory,
                   int64_t in_features)
      : PackedLinear(stack.row_end[stack.num_parts - 1], in_features),
        stack_(stack),
        memory_(std::move(memory)) {}

  const MatrixStack& stack() const { return stack_; }

 private:
  MatrixStack stack_;
  std::unique_ptr<DeviceBuffer> memory_;
};

// Errors: kInvalidArgument for no tensors, unequal columns, a dtype without a kernel, or more than
// kMaxStacked tensors that differ in dtype or have scales.
absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(absl::Span<const WeightTensor> stacked);

// REQUIRES: params.weight was made by PackLinear.
absl::Status Linear(const Launcher& launcher, const LinearParams& params);
// Of few rows, the kernel that multiplies them reads float32.  REQUIRES: made by PackLinear.
bool LinearRoundsInput(const Device& device, const PackedLinear& weight, int32_t num_rows);
int64_t LinearWorkspaceBytes(int32_t max_rows, int64_t max_in_features);

// out [num_rows, in_features] <- the prologue of `params`: what goes into the product.
absl::Status PrepareRows(const Launcher& launcher, const LinearParams& params, int64_t in_features,
                         float* out);

absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(const WeightTensor& tensor,
                                                                 const HeadSlice& slice);
// W of all heads [num_heads, out_features, in_features] in bf16; null if it is stored otherwise.
// REQUIRES: made by PackHeadLinear.
const uint16_t* Bfloat16Heads(const PackedHeadLinear& weight);
// REQUIRES: params.weight was made by PackHeadLinear.
absl::Status HeadLinear(const Launcher& launcher, const HeadLinearParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LINEAR_H_

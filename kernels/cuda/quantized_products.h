// Products of many rows with weights of fp8 or fp4: the experts' of a layer, or one matrix's. Tiles
// of 128 weight rows by up to 128 tokens.  Weights come to shared memory as they are stored and are
// widened to bf16, exactly, on their way to the product's registers; so are activations bf16, in
// the order of fragment_order.cuh, and sums float32.
//
// A sum is over the depth in ascending order, in a tree that the hardware fixes: a token's bits do
// not depend on the other tokens, nor on its place in the tile.  Of a matrix of few tiles up to 128
// tokens' depth is cut among the blocks of a cluster, whose sums are added in ascending order:
// theirs may differ from those of more tokens.

#ifndef KERNELS_CUDA_QUANTIZED_PRODUCTS_H_
#define KERNELS_CUDA_QUANTIZED_PRODUCTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/expert_products.h"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/weight_format.h"

namespace kernels::cuda {

// Scales of a matrix, or of a stack of equal ones (StreamedMatrix::scales).
struct QuantizedScales {
  const std::byte* data = nullptr;
  int64_t stack_stride = 0;  // bytes from matrix to matrix
};

// Either of `tiles`' two halves, the experts' or the shared one's (a matrix by itself), in
// `format`; its maps of weights are MapQuantized's, those of tokens are of kTokenStep rows.
struct QuantizedProduct {
  ExpertProduct tiles;
  WeightFormat format = WeightFormat::kFloat8;
  QuantizedScales first, second, shared_first, shared_second;
  bool swiglu = false;
  bool is_linear = false;  // results go to `output`, not to tiles.out or tiles.shared_out
  LinearOutput output;
  WeightFormat out_order = WeightFormat::kBfloat16;  // of what goes to these two
};

// Of `count` matrices, data `stack_stride` bytes apart.  False: the copy engine does not take them.
bool CanMapQuantized(const StoredMatrix& matrix, int64_t count, int64_t stack_stride);
absl::StatusOr<CUtensorMap> MapQuantized(const StoredMatrix& matrix, int64_t count,
                                         int64_t stack_stride);

absl::Status MultiplyQuantized(const Launcher& launcher, const QuantizedProduct& product);

// The products of all experts, `product`'s format and order aside, which are the experts': with
// `swiglu` results are in the order that the products after them take.
absl::Status MultiplyQuantizedExperts(const Launcher& launcher, const QuantizedProduct& product,
                                      ExpertFormats formats);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_QUANTIZED_PRODUCTS_H_

// Tensor maps: how the copy engine sees a bf16 matrix, or one of bytes.  A copy moves a box of 64 x
// 64 (or of fewer rows) into shared memory, every row of it 128 bytes with the 128-byte swizzle
// that warpgroup_product.cuh reads; what lies beyond the matrix arrives as zeros.

#ifndef KERNELS_CUDA_TENSOR_MAP_H_
#define KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kernels::cuda {

inline constexpr int32_t kBoxRows = 64;
inline constexpr int32_t kBoxColumns = 64;
inline constexpr int32_t kBoxElements = kBoxRows * kBoxColumns;

// A stack of equal bf16 matrices [rows, columns], strides in elements.
struct MatrixShape {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t count = 1;
  int64_t stack_stride = 0;  // from matrix to matrix; of no meaning when there is one
};

struct BoxOptions {
  int32_t rows = kBoxRows;
  // Whether the second-level cache fetches the neighbouring 128 bytes too.
  bool fetch_neighbours = true;
};

// What the copy engine asks for: addresses and strides that are multiples of 16 bytes.
bool CanMap(const MatrixShape& shape);

// REQUIRES: CanMap; 0 < boxes.rows <= kBoxRows.
// Errors: kInternal if the driver refuses.
absl::StatusOr<CUtensorMap> MakeTensorMap(const MatrixShape& shape, const BoxOptions& boxes = {});

// The same for a matrix of bytes, sizes and strides in bytes.  A box has kBoxRows rows of
// `box_bytes`, 64 or 128, with the swizzle of as many bytes.
bool CanMapBytes(const MatrixShape& shape);
absl::StatusOr<CUtensorMap> MakeByteMap(const MatrixShape& shape, int32_t box_bytes);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TENSOR_MAP_H_

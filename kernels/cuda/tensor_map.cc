#include "kernels/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime has loaded: nothing links to it.
absl::StatusOr<Encode> FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  RETURN_IF_ERROR(ToStatus(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                            12000, cudaEnableDefault, &found),
                           "looking for cuTensorMapEncodeTiled"));
  if (found != cudaDriverEntryPointSuccess) {
    return absl::InternalError("cuda: the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

bool CanMap(const MatrixShape& shape) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  return reinterpret_cast<uintptr_t>(shape.data) % 16 == 0 && shape.row_stride % 8 == 0 &&
         (shape.count == 1 || shape.stack_stride % 8 == 0) && shape.rows > 0 && shape.columns > 0 &&
         shape.rows < kLimit && shape.columns < kLimit && shape.row_stride >= shape.columns;
}

absl::StatusOr<CUtensorMap> MakeTensorMap(const MatrixShape& shape, const BoxOptions& boxes) {
  static const absl::StatusOr<Encode> encode = FindEncode();
  RETURN_IF_ERROR(encode.status());
  const auto size = [](int64_t count) { return static_cast<cuuint64_t>(count); };
  const int64_t stack_stride =
      shape.count == 1 ? shape.row_stride * shape.rows : shape.stack_stride;
  const cuuint64_t sizes[] = {size(shape.columns), size(shape.rows), size(shape.count)};
  const cuuint64_t strides[] = {size(2 * shape.row_stride), size(2 * stack_stride)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(boxes.rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(shape.data), sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                boxes.fetch_neighbours ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                       : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuda: no tensor map of [", shape.count, ", ",
                                            shape.rows, ", ", shape.columns, "] with strides ",
                                            stack_stride, " and ", shape.row_stride, ": error ",
                                            static_cast<int>(result)));
  }
  return map;
}

}  // namespace kernels::cuda

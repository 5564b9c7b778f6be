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

struct Element {
  CUtensorMapDataType type;
  int64_t bytes;
};
constexpr Element kBfloat16{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
constexpr Element kByte{CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

bool CanMapElements(const MatrixShape& shape, const Element& element) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  constexpr int64_t kAlignment = 16;  // bytes
  return reinterpret_cast<uintptr_t>(shape.data) % kAlignment == 0 &&
         shape.row_stride * element.bytes % kAlignment == 0 &&
         (shape.count == 1 || shape.stack_stride * element.bytes % kAlignment == 0) &&
         shape.rows > 0 && shape.columns > 0 && shape.rows < kLimit && shape.columns < kLimit &&
         shape.row_stride >= shape.columns;
}

struct Box {
  int64_t columns;
  int64_t rows;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion fetched;
};

absl::StatusOr<CUtensorMap> MakeMap(const MatrixShape& shape, const Element& element,
                                    const Box& of) {
  static const absl::StatusOr<Encode> encode = FindEncode();
  RETURN_IF_ERROR(encode.status());
  const auto size = [](int64_t count) { return static_cast<cuuint64_t>(count); };
  const int64_t stack_stride =
      shape.count == 1 ? shape.row_stride * shape.rows : shape.stack_stride;
  const cuuint64_t sizes[] = {size(shape.columns), size(shape.rows), size(shape.count)};
  const cuuint64_t strides[] = {size(element.bytes * shape.row_stride),
                                size(element.bytes * stack_stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(of.columns), static_cast<cuuint32_t>(of.rows),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = (*encode)(&map, element.type, 3, const_cast<void*>(shape.data), sizes,
                                    strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, of.swizzle,
                                    of.fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuda: no tensor map of [", shape.count, ", ",
                                            shape.rows, ", ", shape.columns, "] with strides ",
                                            stack_stride, " and ", shape.row_stride, ": error ",
                                            static_cast<int>(result)));
  }
  return map;
}

}  // namespace

bool CanMap(const MatrixShape& shape) { return CanMapElements(shape, kBfloat16); }

absl::StatusOr<CUtensorMap> MakeTensorMap(const MatrixShape& shape, const BoxOptions& boxes) {
  return MakeMap(shape, kBfloat16,
                 {.columns = kBoxColumns,
                  .rows = boxes.rows,
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .fetched = boxes.fetch_neighbours ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                                    : CU_TENSOR_MAP_L2_PROMOTION_L2_128B});
}

bool CanMapBytes(const MatrixShape& shape) { return CanMapElements(shape, kByte); }

absl::StatusOr<CUtensorMap> MakeByteMap(const MatrixShape& shape, int32_t box_bytes) {
  return MakeMap(
      shape, kByte,
      {.columns = box_bytes,
       .rows = kBoxRows,
       .swizzle = box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
       .fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

}  // namespace kernels::cuda

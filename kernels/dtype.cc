#include "kernels/dtype.h"

namespace kernels {

int32_t DTypeBits(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 32;
    case DType::kBfloat16:
    case DType::kFloat16:
      return 16;
    case DType::kFloat8E4m3:
    case DType::kFloat8E8m0:
      return 8;
    case DType::kFloat4E2m1:
      return 4;
    case DType::kInt64:
      return 64;
  }
  return 0;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat8E4m3:
      return "float8_e4m3";
    case DType::kFloat8E8m0:
      return "float8_e8m0";
    case DType::kFloat4E2m1:
      return "float4_e2m1";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

}  // namespace kernels

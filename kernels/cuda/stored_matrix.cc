#include "kernels/cuda/stored_matrix.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int64_t kAlignment = 256;  // bytes

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool HasKernel(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBfloat16 || dtype == DType::kFloat16 ||
         dtype == DType::kFloat8E4m3 || dtype == DType::kFloat4E2m1;
}

// Scales of fp8's blocks of 128 x 128 are float32 on the device, whose fast kernels read them so.
DType UploadedScaleType(const WeightTensor& tensor) {
  const bool is_block = tensor.dtype == DType::kFloat8E4m3 && tensor.scale_block_rows == 128 &&
                        tensor.scale_block_cols == 128;
  return is_block ? DType::kFloat32 : tensor.scale_dtype;
}

}  // namespace

absl::Status CheckStored(const WeightTensor& tensor) {
  if (!HasKernel(tensor.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no cuda kernel for weights of dtype ", std::string(DTypeName(tensor.dtype))));
  }
  if (tensor.data == nullptr || tensor.rows <= 0 || tensor.cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight tensor of shape [", tensor.rows, ", ", tensor.cols, "]",
                     tensor.data == nullptr ? " without data" : " is empty"));
  }
  if (tensor.dtype == DType::kFloat4E2m1 && tensor.cols % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("fp4 weight tensor with an odd number of columns: ", tensor.cols));
  }
  if (tensor.scales == nullptr) return absl::OkStatus();
  if (tensor.scale_dtype != DType::kFloat32 && tensor.scale_dtype != DType::kFloat8E8m0) {
    return absl::InvalidArgumentError(absl::StrCat("no cuda kernel for scales of dtype ",
                                                   std::string(DTypeName(tensor.scale_dtype))));
  }
  if (tensor.scale_block_rows <= 0 || tensor.scale_block_cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale blocks of ", tensor.scale_block_rows, " x ", tensor.scale_block_cols));
  }
  return absl::OkStatus();
}

int64_t MatrixUploader::Area::Place(const void* host, int64_t count, int64_t alignment) {
  const int64_t offset = CeilDiv(size_bytes, alignment) * alignment;
  pieces.push_back({host, count, offset});
  size_bytes = offset + count;
  return offset;
}

int64_t MatrixUploader::PlaceScales(const WeightTensor& tensor, int64_t alignment) {
  const int64_t count =
      CeilDiv(tensor.rows, tensor.scale_block_rows) * CeilDiv(tensor.cols, tensor.scale_block_cols);
  if (UploadedScaleType(tensor) == tensor.scale_dtype) {
    return scales_.Place(tensor.scales, count * DTypeBits(tensor.scale_dtype) / 8, alignment);
  }
  std::vector<float>& widened = widened_.emplace_back();
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t code = static_cast<const uint8_t*>(tensor.scales)[i];
    widened.push_back(code == 0xff ? std::numeric_limits<float>::quiet_NaN()
                                   : std::ldexp(1.0f, code - 127));
  }
  return scales_.Place(widened.data(), count * static_cast<int64_t>(sizeof(float)), alignment);
}

void MatrixUploader::Add(const WeightTensor& tensor, const void* data, int64_t rows, int64_t cols) {
  StoredMatrix matrix{.rows = rows, .cols = cols, .dtype = tensor.dtype};
  int64_t scale_offset = -1;
  if (tensor.scales != nullptr) {
    matrix.scale_block_rows = tensor.scale_block_rows;
    matrix.scale_block_cols = tensor.scale_block_cols;
    matrix.scale_cols = CeilDiv(tensor.cols, tensor.scale_block_cols);
    matrix.scale_dtype = UploadedScaleType(tensor);
    scale_offset = PlaceScales(tensor, kAlignment);
  }
  data_offset_.push_back(data_.Place(data, rows * cols * DTypeBits(tensor.dtype) / 8, kAlignment));
  scale_offset_.push_back(scale_offset);
  matrices_.push_back(matrix);
}

void MatrixUploader::Stack(const WeightTensor& tensor) {
  const auto fits = [&](const StoredMatrix& last) {
    if (last.dtype != tensor.dtype || last.cols != tensor.cols) return false;
    const bool is_scaled = scale_offset_.back() >= 0;
    if (tensor.scales == nullptr || !is_scaled) return tensor.scales == nullptr && !is_scaled;
    return last.scale_dtype == UploadedScaleType(tensor) &&
           last.scale_block_rows == tensor.scale_block_rows &&
           last.scale_block_cols == tensor.scale_block_cols &&
           last.rows % last.scale_block_rows == 0;
  };
  if (matrices_.empty() || !fits(matrices_.back())) return Add(tensor);
  // The last matrix and its scales end where their areas end.
  data_.Place(tensor.data, tensor.rows * tensor.cols * DTypeBits(tensor.dtype) / 8,
              /*alignment=*/1);
  if (tensor.scales != nullptr) PlaceScales(tensor, /*alignment=*/1);
  matrices_.back().rows += tensor.rows;
}

absl::StatusOr<MatrixUploader::Result> MatrixUploader::Upload() const {
  Result result;
  const int64_t scales_begin = CeilDiv(data_.size_bytes, kAlignment) * kAlignment;
  ASSIGN_OR_RETURN(result.memory, DeviceBuffer::Allocate(scales_begin + scales_.size_bytes));
  const auto upload = [](std::byte* base, const Area& area) -> absl::Status {
    for (const Piece& piece : area.pieces) {
      RETURN_IF_ERROR(
          ToStatus(cudaMemcpy(base + piece.offset, piece.host,
                              static_cast<size_t>(piece.size_bytes), cudaMemcpyHostToDevice),
                   "copying weights to the device"));
    }
    return absl::OkStatus();
  };
  std::byte* base = result.memory->data();
  RETURN_IF_ERROR(upload(base, data_));
  RETURN_IF_ERROR(upload(base + scales_begin, scales_));
  // A copy from pageable memory returns while its last bytes are still on their way.
  RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(nullptr), "copying weights to the device"));
  result.matrices = matrices_;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    result.matrices[i].data = base + data_offset_[i];
    if (scale_offset_[i] >= 0) {
      result.matrices[i].scales = base + scales_begin + scale_offset_[i];
    }
  }
  return result;
}

}  // namespace kernels::cuda

#include "kernels/cuda/stored_matrix.h"

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

int64_t MatrixUploader::Place(const void* host, int64_t size_bytes, int64_t alignment) {
  const int64_t offset = CeilDiv(size_bytes_, alignment) * alignment;
  pieces_.push_back({host, size_bytes, offset});
  size_bytes_ = offset + size_bytes;
  return offset;
}

void MatrixUploader::Add(const WeightTensor& tensor, const void* data, int64_t rows, int64_t cols) {
  StoredMatrix matrix{.rows = rows, .cols = cols, .dtype = tensor.dtype};
  int64_t scale_offset = -1;
  if (tensor.scales != nullptr) {
    matrix.scale_block_rows = tensor.scale_block_rows;
    matrix.scale_block_cols = tensor.scale_block_cols;
    matrix.scale_cols = CeilDiv(tensor.cols, tensor.scale_block_cols);
    matrix.scale_dtype = tensor.scale_dtype;
    const int64_t count = CeilDiv(tensor.rows, tensor.scale_block_rows) * matrix.scale_cols;
    scale_offset = Place(tensor.scales, count * DTypeBits(tensor.scale_dtype) / 8, kAlignment);
  }
  data_offset_.push_back(Place(data, rows * cols * DTypeBits(tensor.dtype) / 8, kAlignment));
  scale_offset_.push_back(scale_offset);
  matrices_.push_back(matrix);
}

void MatrixUploader::Stack(const WeightTensor& tensor) {
  if (matrices_.empty() || matrices_.back().dtype != tensor.dtype || scale_offset_.back() >= 0 ||
      tensor.scales != nullptr || matrices_.back().cols != tensor.cols) {
    return Add(tensor);
  }
  // The last matrix ends where the memory ends.
  Place(tensor.data, tensor.rows * tensor.cols * DTypeBits(tensor.dtype) / 8, /*alignment=*/1);
  matrices_.back().rows += tensor.rows;
}

absl::StatusOr<MatrixUploader::Result> MatrixUploader::Upload() const {
  Result result;
  ASSIGN_OR_RETURN(result.memory, DeviceBuffer::Allocate(size_bytes_));
  std::byte* base = result.memory->data();
  for (const Piece& piece : pieces_) {
    RETURN_IF_ERROR(
        ToStatus(cudaMemcpy(base + piece.offset, piece.host, static_cast<size_t>(piece.size_bytes),
                            cudaMemcpyHostToDevice),
                 "copying weights to the device"));
  }
  // A copy from pageable memory returns while its last bytes are still on their way.
  RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(nullptr), "copying weights to the device"));
  result.matrices = matrices_;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    result.matrices[i].data = base + data_offset_[i];
    if (scale_offset_[i] >= 0) result.matrices[i].scales = base + scale_offset_[i];
  }
  return result;
}

}  // namespace kernels::cuda

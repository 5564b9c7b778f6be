// Weights in device memory, as the checkpoint stores them: rows of `cols` elements without gaps.

#ifndef KERNELS_CUDA_STORED_MATRIX_H_
#define KERNELS_CUDA_STORED_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/tensor.h"

namespace kernels::cuda {

// A view, passed to kernels by value.  Scales multiply; element (r, c) has
// scales[r / scale_block_rows][c / scale_block_cols].
struct StoredMatrix {
  const void* data = nullptr;    // [rows, cols], 256-byte aligned
  const void* scales = nullptr;  // [.., scale_cols] float32 or e8m0; null: unscaled
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t scale_cols = 0;
  int64_t scale_block_rows = 1;
  int64_t scale_block_cols = 1;
  DType dtype = DType::kBfloat16;
  DType scale_dtype = DType::kFloat32;
};

// Errors: kInvalidArgument if no kernel here reads such a tensor.
absl::Status CheckStored(const WeightTensor& tensor);

// Copies tensors into one piece of device memory.  REQUIRES: CheckStored of each is OK; host data
// lives until Upload.
class MatrixUploader final {
 public:
  // Adds a matrix; its view becomes valid with Upload, at the same index.
  void Add(const WeightTensor& tensor) { Add(tensor, tensor.data, tensor.rows, tensor.cols); }
  // The same with `data` [rows, cols] in place of the tensor's, in its dtype and with its scales.
  void Add(const WeightTensor& tensor, const void* data, int64_t rows, int64_t cols);
  // Adds the tensor's rows to the last matrix if they can be one (stored alike, and no block of
  // scales begins in one and ends in the other), else as a matrix of its own.
  void Stack(const WeightTensor& tensor);

  struct Result {
    std::unique_ptr<DeviceBuffer> memory;
    std::vector<StoredMatrix> matrices;
  };
  // Blocks until every byte is there.
  absl::StatusOr<Result> Upload() const;

 private:
  struct Piece {
    const void* host = nullptr;
    int64_t size_bytes = 0;
    int64_t offset = 0;
  };
  // A part of the memory: data, or scales, so that a stack's lie together too.
  struct Area {
    std::vector<Piece> pieces;
    int64_t size_bytes = 0;
    int64_t Place(const void* host, int64_t size_bytes, int64_t alignment);
  };
  // Adds the tensor's scales; where they are.
  int64_t PlaceScales(const WeightTensor& tensor, int64_t alignment);

  Area data_, scales_;
  std::deque<std::vector<float>> widened_;  // scales as they are uploaded
  std::vector<StoredMatrix> matrices_;      // without pointers until Upload
  std::vector<int64_t> data_offset_;        // of each matrix in data_
  std::vector<int64_t> scale_offset_;       // -1: none
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_STORED_MATRIX_H_

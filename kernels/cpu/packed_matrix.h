// PackedMatrix: one weight matrix W [n, k] in panels of 32 outputs (matrix_kernels.h), copied from
// a checkpoint tensor in its stored format, with its block scales spread over the panel's columns.
//
// Scaled matrices are cut along k at every border of a scale block and at most every 128; unscaled
// ones are one chunk.  e8m0 scales of e2m1 matrices stay bytes (as floats they would be a quarter
// of the weights).  Immutable once packed.

#ifndef KERNELS_CPU_PACKED_MATRIX_H_
#define KERNELS_CPU_PACKED_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/matrix_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// Rows of a tensor, read as W [n, k]: [row_count, cols], or its transpose [cols, row_count].
struct MatrixSource {
  WeightTensor tensor;
  int64_t row_begin = 0;
  int64_t row_count = 0;
  bool transpose = false;

  int64_t n() const { return transpose ? tensor.cols : row_count; }
  int64_t k() const { return transpose ? row_count : tensor.cols; }
};

// kOk if a kernel exists for the tensor's dtypes and its sizes make sense.
absl::Status CheckWeightTensor(const WeightTensor& tensor);

class PackedMatrix final {
 public:
  // Steps [k_begin, k_begin + count) of the inner dimension; `offset_bytes` in the panel.
  struct Chunk {
    int64_t k_begin = 0;
    int64_t count = 0;
    int64_t offset_bytes = 0;
  };

  // `kernels` computes with the matrix, unless it holds values that only the generic ones keep.
  // REQUIRES: the source's rows lie inside its tensor.
  static absl::StatusOr<PackedMatrix> Pack(ThreadPool& pool, const MatrixSource& source,
                                           const MatrixKernels& kernels);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t num_panels() const { return (n_ + kPanelColumns - 1) / kPanelColumns; }
  int32_t panel_columns(int64_t panel) const {
    const int64_t left = n_ - panel * kPanelColumns;
    return static_cast<int32_t>(left < kPanelColumns ? left : kPanelColumns);
  }
  const MatrixKernels& kernels() const { return *kernels_; }

  // c[r][0:32] = sum_k rows[r][k] * W[32 * panel + j][k]; columns past n give 0.  One thread's
  // work.
  void MultiplyPanel(int64_t panel, const float* const* rows, int32_t num_rows,
                     float* c /* [num_rows][32] */) const;

 private:
  struct FreeDeleter {
    void operator()(std::byte* bytes) const;
  };

  void PackPanel(const MatrixSource& source, int64_t panel, bool* has_nan);
  // False if a scale leaves float's range.
  bool PackScales(const MatrixSource& source, int64_t panel);
  size_t scale_index(int64_t panel, size_t chunk) const {
    return (static_cast<size_t>(panel) * chunks_.size() + chunk) * kPanelColumns;
  }
  // The 32 scales of a chunk, null if unscaled; `expanded` is where bytes become floats.
  const float* scales(int64_t panel, size_t chunk, float* expanded /* [32] */) const;

  int64_t n_ = 0;
  int64_t k_ = 0;
  StoredFormat format_ = StoredFormat::kFloat32;
  const MatrixKernels* kernels_ = nullptr;
  std::vector<Chunk> chunks_;
  int64_t panel_bytes_ = 0;
  std::unique_ptr<std::byte, FreeDeleter> data_;  // [num_panels][panel_bytes]
  // Of these one is in use: [num_panels][num_chunks][32]; both empty: unscaled.
  std::vector<float> scales_;
  std::vector<uint8_t> e8m0_scales_;
};

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_PACKED_MATRIX_H_

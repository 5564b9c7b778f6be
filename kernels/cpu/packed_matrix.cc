#include "kernels/cpu/packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

constexpr int64_t kMaxScaledChunk = 128;
// Steps that MultiplyPanel expands at once: 128 * 32 floats are half of a usual first-level cache.
constexpr int64_t kExpandSteps = 128;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::StatusOr<StoredFormat> FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return StoredFormat::kFloat32;
    case DType::kFloat16:
      return StoredFormat::kFloat16;
    case DType::kBfloat16:
      return StoredFormat::kBfloat16;
    case DType::kFloat8E4m3:
      return StoredFormat::kE4m3;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("no cpu kernel for weights of dtype ", std::string(DTypeName(dtype))));
  }
}

// Huge pages: a decode step reads every byte once, and 4 KiB pages cost it in page walks.
std::byte* AllocateWeights(int64_t size_bytes) {
  const int64_t alignment = size_bytes >= 2 * kHugePageBytes ? kHugePageBytes : 64;
  const int64_t rounded = std::max<int64_t>(CeilDiv(size_bytes, alignment) * alignment, alignment);
  void* memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded));
  FERRY_CHECK(memory != nullptr) << "out of memory: " << rounded << " bytes of weights";
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePageBytes) madvise(memory, static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
  return static_cast<std::byte*>(memory);
}

float ScaleAt(const WeightTensor& tensor, int64_t row, int64_t col) {
  if (tensor.scales == nullptr) return 1.0f;
  const int64_t index =
      row / tensor.scale_block_rows * CeilDiv(tensor.cols, tensor.scale_block_cols) +
      col / tensor.scale_block_cols;
  if (tensor.scale_dtype == DType::kFloat8E8m0) {
    return FloatFromE8m0(static_cast<const uint8_t*>(tensor.scales)[index]);
  }
  float scale;  // mapped files do not promise alignment
  std::memcpy(&scale, static_cast<const std::byte*>(tensor.scales) + index * 4, sizeof(scale));
  return scale;
}

// What lies together in a panel: kStep inner steps of one column.
template <typename Element, int kStep>
struct Word {
  Element steps[kStep];
};

// Copies one chunk of a panel's columns; missing steps and columns become 0.
template <typename Element, int kStep>
void PackChunk(const MatrixSource& source, int64_t column_begin, int32_t columns,
               const PackedMatrix::Chunk& chunk, Word<Element, kStep>* out) {
  constexpr int64_t kElementBytes = sizeof(Element);
  const int64_t cols = source.tensor.cols;
  // Byte distance of neighbours in the source.
  const int64_t column_stride = (source.transpose ? 1 : cols) * kElementBytes;
  const int64_t step_stride = (source.transpose ? cols : 1) * kElementBytes;
  const std::byte* origin = static_cast<const std::byte*>(source.tensor.data) +
                            source.row_begin * cols * kElementBytes + column_begin * column_stride +
                            chunk.k_begin * step_stride;
  const int64_t num_words = CeilDiv(chunk.count, kStep);
  const int64_t full_words = chunk.count / kStep;
  if (columns < kPanelColumns || full_words < num_words) {
    std::memset(out, 0, static_cast<size_t>(num_words * kPanelColumns) * sizeof(*out));
  }
  // memcpy, because mapped files do not promise alignment.  In blocks of 16 KiB, which stay in the
  // first-level cache while the columns fill them one after the other.
  constexpr int64_t kBlock = 16384 / (kPanelColumns * int64_t{sizeof(*out)});
  for (int64_t begin = 0; begin < num_words; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, num_words);
    for (int32_t j = 0; j < columns; ++j) {
      const std::byte* column = origin + j * column_stride;
      int64_t w = begin;
      if (!source.transpose) {
        for (; w < std::min(end, full_words); ++w) {
          std::memcpy(&out[w * kPanelColumns + j], column + w * kStep * kElementBytes,
                      sizeof(*out));
        }
      }
      for (; w < end; ++w) {
        for (int64_t s = 0; s < std::min<int64_t>(kStep, chunk.count - w * kStep); ++s) {
          std::memcpy(&out[w * kPanelColumns + j].steps[s], column + (w * kStep + s) * step_stride,
                      sizeof(Element));
        }
      }
    }
  }
}

}  // namespace

absl::Status CheckWeightTensor(const WeightTensor& tensor) {
  RETURN_IF_ERROR(FormatOf(tensor.dtype).status());
  if (tensor.data == nullptr || tensor.rows <= 0 || tensor.cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight tensor of shape [", tensor.rows, ", ", tensor.cols, "]",
                     tensor.data == nullptr ? " without data" : " is empty"));
  }
  if (tensor.scales == nullptr) return absl::OkStatus();
  if (tensor.scale_dtype != DType::kFloat32 && tensor.scale_dtype != DType::kFloat8E8m0) {
    return absl::InvalidArgumentError(absl::StrCat("no cpu kernel for scales of dtype ",
                                                   std::string(DTypeName(tensor.scale_dtype))));
  }
  if (tensor.scale_block_rows <= 0 || tensor.scale_block_cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale blocks of ", tensor.scale_block_rows, " x ", tensor.scale_block_cols));
  }
  return absl::OkStatus();
}

void PackedMatrix::FreeDeleter::operator()(std::byte* bytes) const { std::free(bytes); }

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(ThreadPool& pool, const MatrixSource& source,
                                                const MatrixKernels& kernels) {
  const WeightTensor& tensor = source.tensor;
  RETURN_IF_ERROR(CheckWeightTensor(tensor));
  FERRY_CHECK(source.row_begin >= 0 && source.row_count > 0 &&
              source.row_begin + source.row_count <= tensor.rows)
      << "rows " << source.row_begin << " + " << source.row_count << " of " << tensor.rows;
  PackedMatrix matrix;
  matrix.n_ = source.n();
  matrix.k_ = source.k();
  ASSIGN_OR_RETURN(matrix.format_, FormatOf(tensor.dtype));
  matrix.kernels_ = &kernels;

  // e4m3 always goes by scales, which carry the unit of its kernels.
  const bool scaled = tensor.scales != nullptr || matrix.format_ == StoredFormat::kE4m3;
  const int64_t step = InnerStep(matrix.format_);
  int64_t padded_steps = 0;
  for (int64_t k = 0; k < matrix.k_;) {
    int64_t count = matrix.k_ - k;
    if (scaled) {
      count = std::min(count, kMaxScaledChunk);
      if (tensor.scales != nullptr) {
        const int64_t block = source.transpose ? tensor.scale_block_rows : tensor.scale_block_cols;
        const int64_t at = source.transpose ? source.row_begin + k : k;
        count = std::min(count, block - at % block);
      }
    }
    matrix.chunks_.push_back(
        {k, count, padded_steps * kPanelColumns * StoredBytes(matrix.format_)});
    padded_steps += CeilDiv(count, step) * step;
    k += count;
  }
  matrix.panel_bytes_ = padded_steps * kPanelColumns * StoredBytes(matrix.format_);
  matrix.data_.reset(AllocateWeights(matrix.num_panels() * matrix.panel_bytes_));
  if (scaled) {
    matrix.scales_.resize(static_cast<size_t>(matrix.num_panels()) * matrix.chunks_.size() *
                          kPanelColumns);
  }
  std::atomic<bool> any_nan{false}, scale_overflows{false};
  pool.ParallelFor(matrix.num_panels(), [&](int64_t panel) {
    bool has_nan = false;
    matrix.PackPanel(source, panel, &has_nan);
    if (has_nan) any_nan.store(true, std::memory_order_relaxed);
    for (size_t c = 0; scaled && c < matrix.chunks_.size(); ++c) {
      float* scales = const_cast<float*>(matrix.scales(panel, c));
      for (int32_t j = 0; j < kPanelColumns; ++j) {
        if (j >= matrix.panel_columns(panel)) {
          scales[j] = 0;
          continue;
        }
        const int64_t column = panel * kPanelColumns + j, k = matrix.chunks_[c].k_begin;
        const float scale = source.transpose ? ScaleAt(tensor, source.row_begin + k, column)
                                             : ScaleAt(tensor, source.row_begin + column, k);
        scales[j] = matrix.format_ == StoredFormat::kE4m3 ? scale / kE4m3Unit : scale;
        if (std::isinf(scales[j])) scale_overflows.store(true, std::memory_order_relaxed);
      }
    }
  });
  if (scale_overflows.load()) {
    return absl::InvalidArgumentError(absl::StrCat("weight tensor of shape [", tensor.rows, ", ",
                                                   tensor.cols, "] has a scale beyond 2^120"));
  }
  if (any_nan.load() && !kernels.keeps_e4m3_nan) matrix.kernels_ = &GenericMatrixKernels();
  return matrix;
}

void PackedMatrix::PackPanel(const MatrixSource& source, int64_t panel, bool* has_nan) {
  std::byte* out = data_.get() + panel * panel_bytes_;
  const int64_t column_begin = panel * kPanelColumns;
  const int32_t columns = panel_columns(panel);
  for (const Chunk& chunk : chunks_) {
    std::byte* at = out + chunk.offset_bytes;
    switch (format_) {
      case StoredFormat::kFloat32:
        PackChunk(source, column_begin, columns, chunk, reinterpret_cast<Word<uint32_t, 1>*>(at));
        break;
      case StoredFormat::kFloat16:
        PackChunk(source, column_begin, columns, chunk, reinterpret_cast<Word<uint16_t, 1>*>(at));
        break;
      case StoredFormat::kBfloat16:
        PackChunk(source, column_begin, columns, chunk, reinterpret_cast<Word<uint16_t, 2>*>(at));
        break;
      case StoredFormat::kE4m3:
        PackChunk(source, column_begin, columns, chunk, reinterpret_cast<Word<uint8_t, 2>*>(at));
        break;
    }
  }
  if (format_ == StoredFormat::kE4m3) {
    // Adding 1 to the seven low bits of a byte carries into the eighth only if they are all ones.
    uint64_t carries = 0;
    for (int64_t i = 0; i < panel_bytes_; i += 8) {
      uint64_t bytes;
      std::memcpy(&bytes, out + i, sizeof(bytes));
      carries |= (bytes & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
    }
    *has_nan = (carries & 0x8080808080808080) != 0;
  }
}

void PackedMatrix::MultiplyPanel(int64_t panel, const float* const* rows, int32_t num_rows,
                                 float* c) const {
  std::fill_n(c, int64_t{num_rows} * kPanelColumns, 0.0f);
  const std::byte* weights = data_.get() + panel * panel_bytes_;
  const size_t format = static_cast<size_t>(format_);
  alignas(64) float expanded[kExpandSteps * kPanelColumns];
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    const std::byte* chunk_weights = weights + chunk.offset_bytes;
    if (num_rows <= kMaxDirectRows) {
      kernels_->multiply_rows[format](rows, num_rows, chunk.k_begin, chunk.count, chunk_weights,
                                      scales(panel, i), c);
      continue;
    }
    for (int64_t k = 0; k < chunk.count; k += kExpandSteps) {
      const int64_t count = std::min(kExpandSteps, chunk.count - k);
      kernels_->expand[format](chunk_weights + k * kPanelColumns * StoredBytes(format_), count,
                               expanded);
      for (int32_t r = 0; r < num_rows; r += kTileRows) {
        kernels_->multiply_tile(rows + r, std::min(kTileRows, num_rows - r), chunk.k_begin + k,
                                count, expanded, scales(panel, i), c + r * kPanelColumns);
      }
    }
  }
}

}  // namespace kernels::cpu

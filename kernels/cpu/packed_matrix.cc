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
    case DType::kFloat4E2m1:
      return StoredFormat::kE2m1;
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

int64_t ScaleIndex(const WeightTensor& tensor, int64_t row, int64_t col) {
  return row / tensor.scale_block_rows * CeilDiv(tensor.cols, tensor.scale_block_cols) +
         col / tensor.scale_block_cols;
}

float ScaleAt(const WeightTensor& tensor, int64_t row, int64_t col) {
  if (tensor.scales == nullptr) return 1.0f;
  const int64_t index = ScaleIndex(tensor, row, col);
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
  // Two e2m1 columns share a byte and cannot be parted.
  if (tensor.dtype == DType::kFloat4E2m1 &&
      (tensor.cols % 2 != 0 || (tensor.scales != nullptr && tensor.scale_block_cols % 2 != 0))) {
    return absl::InvalidArgumentError(
        absl::StrCat("float4_e2m1 weight tensor of ", tensor.cols, " columns with scales over ",
                     tensor.scale_block_cols, " of them: both must be even"));
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
  if (source.transpose && tensor.dtype == DType::kFloat4E2m1) {
    return absl::InvalidArgumentError("no cpu kernel for transposed weights of dtype float4_e2m1");
  }
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
    matrix.chunks_.push_back({k, count, StoredBytes(matrix.format_, padded_steps)});
    padded_steps += CeilDiv(count, step) * step;
    k += count;
  }
  matrix.panel_bytes_ = StoredBytes(matrix.format_, padded_steps);
  matrix.data_.reset(AllocateWeights(matrix.num_panels() * matrix.panel_bytes_));
  if (scaled) {
    const size_t num_scales = matrix.scale_index(matrix.num_panels(), 0);
    if (matrix.format_ == StoredFormat::kE2m1 && tensor.scale_dtype == DType::kFloat8E8m0) {
      matrix.e8m0_scales_.resize(num_scales);
    } else {
      matrix.scales_.resize(num_scales);
    }
  }
  std::atomic<bool> any_nan{false}, scale_overflows{false};
  pool.ParallelFor(matrix.num_panels(), [&](int64_t panel) {
    bool has_nan = false;
    matrix.PackPanel(source, panel, &has_nan);
    if (has_nan) any_nan.store(true, std::memory_order_relaxed);
    if (scaled && !matrix.PackScales(source, panel)) {
      scale_overflows.store(true, std::memory_order_relaxed);
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
      case StoredFormat::kE2m1: {
        // A byte of the source is a word of the panel: bytes are packed as if they were elements.
        MatrixSource bytes = source;
        bytes.tensor.cols /= 2;
        PackChunk(bytes, column_begin, columns, {chunk.k_begin / 2, CeilDiv(chunk.count, 2), 0},
                  reinterpret_cast<Word<uint8_t, 1>*>(at));
        break;
      }
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

bool PackedMatrix::PackScales(const MatrixSource& source, int64_t panel) {
  const WeightTensor& tensor = source.tensor;
  bool finite = true;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const size_t at = scale_index(panel, c);
    const int64_t k = chunks_[c].k_begin;
    for (int32_t j = 0; j < panel_columns(panel); ++j) {  // the others stay 0: zero weights anyway
      const int64_t column = panel * kPanelColumns + j;
      const int64_t row = source.row_begin + (source.transpose ? k : column);
      const int64_t col = source.transpose ? column : k;
      if (!e8m0_scales_.empty()) {
        e8m0_scales_[at + j] =
            static_cast<const uint8_t*>(tensor.scales)[ScaleIndex(tensor, row, col)];
        continue;
      }
      const float scale = ScaleAt(tensor, row, col);
      scales_[at + j] = format_ == StoredFormat::kE4m3 ? scale / kE4m3Unit : scale;
      finite = finite && !std::isinf(scales_[at + j]);
    }
  }
  return finite;
}

const float* PackedMatrix::scales(int64_t panel, size_t chunk, float* expanded) const {
  if (!scales_.empty()) return &scales_[scale_index(panel, chunk)];
  if (e8m0_scales_.empty()) return nullptr;
  const uint8_t* stored = &e8m0_scales_[scale_index(panel, chunk)];
  for (int32_t j = 0; j < kPanelColumns; ++j) expanded[j] = FloatFromE8m0(stored[j]);
  return expanded;
}

void PackedMatrix::MultiplyPanel(int64_t panel, const float* const* rows, int32_t num_rows,
                                 float* c) const {
  std::fill_n(c, int64_t{num_rows} * kPanelColumns, 0.0f);
  const std::byte* weights = data_.get() + panel * panel_bytes_;
  const size_t format = static_cast<size_t>(format_);
  alignas(64) float expanded[kExpandSteps * kPanelColumns];
  alignas(64) float expanded_scales[kPanelColumns];
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    const std::byte* chunk_weights = weights + chunk.offset_bytes;
    const float* chunk_scales = scales(panel, i, expanded_scales);
    if (num_rows <= kMaxDirectRows) {
      kernels_->multiply_rows[format](rows, num_rows, chunk.k_begin, chunk.count, chunk_weights,
                                      chunk_scales, c);
      continue;
    }
    for (int64_t k = 0; k < chunk.count; k += kExpandSteps) {
      const int64_t count = std::min(kExpandSteps, chunk.count - k);
      kernels_->expand[format](chunk_weights + StoredBytes(format_, k), count, expanded);
      for (int32_t r = 0; r < num_rows; r += kTileRows) {
        kernels_->multiply_tile(rows + r, std::min(kTileRows, num_rows - r), chunk.k_begin + k,
                                count, expanded, chunk_scales, c + r * kPanelColumns);
      }
    }
  }
}

}  // namespace kernels::cpu

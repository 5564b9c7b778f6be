#include "kernels/cpu/linear.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/row_blocks.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

// A panel of one part, and the output columns it makes.
struct PanelRef {
  size_t part = 0;
  int64_t panel = 0;
  int64_t column_begin = 0;
  int32_t columns = 0;
};

// Parts begin at every tensor and, for kSwiGlu, at half of the rows, so that a gate panel and the
// up panel of the same columns are cut alike.
class CpuPackedLinear final : public PackedLinear {
 public:
  CpuPackedLinear(int64_t out_features, int64_t in_features, std::vector<PackedMatrix> parts)
      : PackedLinear(out_features, in_features), parts_(std::move(parts)) {
    int64_t column = 0;
    for (size_t part = 0; part < parts_.size(); ++part) {
      for (int64_t panel = 0; panel < parts_[part].num_panels(); ++panel) {
        const int32_t columns = parts_[part].panel_columns(panel);
        panels_.push_back({part, panel, column, columns});
        column += columns;
      }
    }
    const size_t half = panels_.size() / 2;
    swiglu_ = panels_.size() % 2 == 0 && out_features % 2 == 0;
    for (size_t i = 0; swiglu_ && i < half; ++i) {
      swiglu_ = panels_[i].columns == panels_[i + half].columns;
    }
  }

  const std::vector<PanelRef>& panels() const { return panels_; }
  const PackedMatrix& part(const PanelRef& panel) const { return parts_[panel.part]; }
  const std::vector<PackedMatrix>& parts() const { return parts_; }
  bool supports_swiglu() const { return swiglu_; }

 private:
  std::vector<PackedMatrix> parts_;
  std::vector<PanelRef> panels_;
  bool swiglu_ = false;
};

absl::Status CheckSupported(const LinearParams& params, const CpuPackedLinear& weight) {
  const DType dtype = params.input.dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kBfloat16 && dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("no cpu kernel for activations of dtype ", std::string(DTypeName(dtype))));
  }
  if (params.input.scales != nullptr) {
    return absl::InvalidArgumentError("no cpu kernel for activations with scales");
  }
  for (const OutputSegment& segment : params.outputs) {
    if (segment.dtype != DType::kFloat32) {
      return absl::InvalidArgumentError(absl::StrCat("no cpu kernel for outputs of dtype ",
                                                     std::string(DTypeName(segment.dtype))));
    }
  }
  if (params.epilogue == LinearEpilogue::kSwiGlu && !weight.supports_swiglu()) {
    return absl::InvalidArgumentError(
        absl::StrCat("swiglu needs as many gate rows as up rows, packed alike; weight has ",
                     weight.out_features(), " rows in ", weight.parts().size(), " parts"));
  }
  return absl::OkStatus();
}

// One row of the input as float32.
void LoadRow(const Activation& input, int64_t row, int64_t n, float* out) {
  if (input.dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(input.data) + row * input.row_stride;
    std::copy_n(from, n, out);
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(input.data) + row * input.row_stride;
  for (int64_t i = 0; i < n; ++i) {
    out[i] =
        input.dtype == DType::kBfloat16 ? FloatFromBfloat16(from[i]) : FloatFromFloat16(from[i]);
  }
}

// The prologue of one row: `out` gets what goes into the product.
void PrepareRow(const LinearParams& params, int64_t row, int64_t n, float* out) {
  LoadRow(params.input, row, n, out);
  const int64_t at = row * params.input.row_stride;
  if (params.residual_in != nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] += params.residual_in[at + i];
  }
  if (params.residual_out != nullptr) std::copy_n(out, n, params.residual_out + at);
  if (params.norm_weight != nullptr) RmsNormRow(out, params.norm_weight, params.norm_eps, n, out);
}

// Spreads one row's results for output columns [begin, begin + columns) over the segments.
void StoreRow(const LinearParams& params, int64_t row, int64_t begin, int32_t columns,
              const float* values) {
  int64_t segment_begin = 0;
  for (const OutputSegment& segment : params.outputs) {
    const int64_t from = std::max(begin, segment_begin);
    const int64_t to = std::min(begin + columns, segment_begin + segment.columns);
    if (from < to) {
      float* out =
          static_cast<float*>(segment.data) + row * segment.row_stride + (from - segment_begin);
      const float* in = values + (from - begin);
      if (params.epilogue == LinearEpilogue::kResidual) {
        const float* residual =
            params.epilogue_residual + row * segment.row_stride + (from - segment_begin);
        for (int64_t i = 0; i < to - from; ++i) out[i] = in[i] + residual[i];
      } else {
        std::copy_n(in, to - from, out);
      }
    }
    segment_begin += segment.columns;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
    ThreadPool& pool, absl::Span<const WeightTensor> stacked_rows, const MatrixKernels& kernels) {
  if (stacked_rows.empty()) return absl::InvalidArgumentError("no weight tensor to pack");
  int64_t out_features = 0;
  for (const WeightTensor& tensor : stacked_rows) {
    RETURN_IF_ERROR(CheckWeightTensor(tensor));
    if (tensor.cols != stacked_rows[0].cols) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stacked weight tensors have ", stacked_rows[0].cols, " and ", tensor.cols, " columns"));
    }
    out_features += tensor.rows;
  }
  const int64_t half = out_features % 2 == 0 ? out_features / 2 : -1;
  std::vector<PackedMatrix> parts;
  int64_t row = 0;  // of the stack
  for (const WeightTensor& tensor : stacked_rows) {
    for (int64_t begin = 0; begin < tensor.rows;) {
      int64_t end = tensor.rows;
      if (row + begin < half && half < row + end) end = half - row;
      ASSIGN_OR_RETURN(
          PackedMatrix part,
          PackedMatrix::Pack(pool, {.tensor = tensor, .row_begin = begin, .row_count = end - begin},
                             kernels));
      parts.push_back(std::move(part));
      begin = end;
    }
    row += tensor.rows;
  }
  return std::make_unique<CpuPackedLinear>(out_features, stacked_rows[0].cols, std::move(parts));
}

absl::Status Linear(ThreadPool& pool, const LinearParams& params) {
  FERRY_CHECK(params.weight != nullptr);
  const auto& weight = static_cast<const CpuPackedLinear&>(*params.weight);
  RETURN_IF_ERROR(CheckLinear(params));
  RETURN_IF_ERROR(CheckSupported(params, weight));
  const int64_t in_features = weight.in_features();
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  const bool direct = params.input.dtype == DType::kFloat32 && params.residual_in == nullptr &&
                      params.residual_out == nullptr && params.norm_weight == nullptr;
  const int64_t num_panels =
      static_cast<int64_t>(swiglu ? weight.panels().size() / 2 : weight.panels().size());
  const float* rows[kRowBlock] = {};

  for (int32_t block = 0; block < params.num_rows; block += kRowBlock) {
    const int32_t block_rows = std::min(kRowBlock, params.num_rows - block);
    if (direct) {
      for (int32_t r = 0; r < block_rows; ++r) {
        rows[r] = static_cast<const float*>(params.input.data) +
                  int64_t{block + r} * params.input.row_stride;
      }
    } else {
      float* prepared = reinterpret_cast<float*>(
          pool.Scratch(block_rows * in_features * static_cast<int64_t>(sizeof(float))));
      for (int32_t r = 0; r < block_rows; ++r) rows[r] = prepared + r * in_features;
      pool.ParallelFor(block_rows, [&](int64_t r) {
        PrepareRow(params, block + r, in_features, prepared + r * in_features);
      });
    }
    const int32_t task_rows = RowsPerTask(block_rows, num_panels, pool.num_threads());
    const int64_t pieces = (block_rows + task_rows - 1) / task_rows;
    pool.ParallelFor(num_panels * pieces, [&](int64_t task) {
      // Panels outermost: tasks that run at the same time share a panel in the cache.
      const PanelRef& panel = weight.panels()[static_cast<size_t>(task / pieces)];
      const int32_t begin = static_cast<int32_t>(task % pieces) * task_rows;
      const int32_t num_rows = std::min(task_rows, block_rows - begin);
      alignas(64) float sums[kRowBlock * kPanelColumns];
      weight.part(panel).MultiplyPanel(panel.panel, rows + begin, num_rows, sums);
      if (swiglu) {
        const PanelRef& up = weight.panels()[static_cast<size_t>(task / pieces + num_panels)];
        alignas(64) float up_sums[kRowBlock * kPanelColumns];
        weight.part(up).MultiplyPanel(up.panel, rows + begin, num_rows, up_sums);
        weight.part(up).kernels().swiglu(sums, up_sums, int64_t{num_rows} * kPanelColumns,
                                         params.swiglu_limit, sums);
      }
      for (int32_t r = 0; r < num_rows; ++r) {
        StoreRow(params, block + begin + r, panel.column_begin, panel.columns,
                 sums + r * kPanelColumns);
      }
    });
  }
  return absl::OkStatus();
}

}  // namespace kernels::cpu

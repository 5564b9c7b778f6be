#include "kernels/cpu/head_linear.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/row_blocks.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

class CpuPackedHeadLinear final : public PackedHeadLinear {
 public:
  explicit CpuPackedHeadLinear(std::vector<PackedMatrix> heads)
      : PackedHeadLinear(static_cast<int32_t>(heads.size()), heads[0].n(), heads[0].k()),
        heads_(std::move(heads)) {}

  const std::vector<PackedMatrix>& heads() const { return heads_; }

 private:
  std::vector<PackedMatrix> heads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(ThreadPool& pool,
                                                                 const WeightTensor& tensor,
                                                                 const HeadSlice& slice,
                                                                 const MatrixKernels& kernels) {
  RETURN_IF_ERROR(CheckWeightTensor(tensor));
  RETURN_IF_ERROR(CheckHeadSlice(tensor, slice));
  std::vector<PackedMatrix> heads;
  heads.reserve(static_cast<size_t>(slice.num_heads));
  for (int64_t head = 0; head < slice.num_heads; ++head) {
    ASSIGN_OR_RETURN(PackedMatrix matrix,
                     PackedMatrix::Pack(pool,
                                        {.tensor = tensor,
                                         .row_begin = head * slice.head_rows + slice.row_begin,
                                         .row_count = slice.row_count,
                                         .transpose = slice.transpose},
                                        kernels));
    heads.push_back(std::move(matrix));
  }
  return std::make_unique<CpuPackedHeadLinear>(std::move(heads));
}

absl::Status HeadLinear(ThreadPool& pool, const HeadLinearParams& params) {
  FERRY_CHECK(params.weight != nullptr);
  const auto& weight = static_cast<const CpuPackedHeadLinear&>(*params.weight);
  RETURN_IF_ERROR(CheckHeadLinear(params));
  if (params.rounded_output != nullptr) {
    return absl::InvalidArgumentError("head linear: no cpu kernel that rounds its output");
  }
  const int64_t panels_per_head = weight.heads()[0].num_panels();
  const int64_t num_panels = weight.num_heads() * panels_per_head;
  for (int32_t block = 0; block < params.num_rows; block += kRowBlock) {
    const int32_t block_rows = std::min(kRowBlock, params.num_rows - block);
    const int32_t task_rows = RowsPerTask(block_rows, num_panels, pool.num_threads());
    const int64_t pieces = (block_rows + task_rows - 1) / task_rows;
    pool.ParallelFor(num_panels * pieces, [&](int64_t task) {
      const int64_t head = task / pieces / panels_per_head;
      const int64_t panel = task / pieces % panels_per_head;
      const int64_t begin = block + task % pieces * task_rows;
      const int32_t num_rows =
          static_cast<int32_t>(std::min<int64_t>(task_rows, block + block_rows - begin));
      const PackedMatrix& matrix = weight.heads()[static_cast<size_t>(head)];
      const float* rows[kRowBlock] = {};
      for (int32_t r = 0; r < num_rows; ++r) {
        rows[r] =
            params.input + (begin + r) * params.input_row_stride + head * params.input_head_stride;
      }
      alignas(64) float sums[kRowBlock * kPanelColumns];
      matrix.MultiplyPanel(panel, rows, num_rows, sums);
      for (int32_t r = 0; r < num_rows; ++r) {
        std::copy_n(sums + r * kPanelColumns, matrix.panel_columns(panel),
                    params.output + (begin + r) * params.output_row_stride +
                        head * params.output_head_stride + panel * kPanelColumns);
      }
    });
  }
  return absl::OkStatus();
}

}  // namespace kernels::cpu

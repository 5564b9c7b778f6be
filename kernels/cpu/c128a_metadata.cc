#include "kernels/cpu/c128a_metadata.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

int32_t VisibleEntries(const C128AMetadataParams& params, int32_t row) {
  return params.slots[row] < 0 ? 0 : (params.positions[row] + 1) / params.tokens_per_entry;
}

absl::Status CheckVisible(const C128AMetadataParams& params) {
  for (int32_t row = 0; row < params.num_rows; ++row) {
    if (const int32_t visible = VisibleEntries(params, row); visible > params.width) {
      return absl::InvalidArgumentError(absl::StrCat("c128a metadata: row ", row, " sees ", visible,
                                                     " entries, the width is ", params.width));
    }
  }
  return absl::OkStatus();
}

void WriteRow(const C128AMetadataParams& params, int32_t row) {
  const int32_t visible = VisibleEntries(params, row);
  int32_t* indices = params.indices + row * params.index_stride;
  params.lengths[row] = visible;
  for (int32_t j = 0; j < visible; ++j) {
    indices[j] = j;
    if (row >= params.num_decode_rows) continue;
    const int32_t block = params.block_table[params.row_to_seq[row] * params.block_table_stride +
                                             j / params.block_entries];
    const int64_t slot = int64_t{block} * params.block_entries + j % params.block_entries;
    indices[j] =
        block < 0 || slot > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(slot);
  }
  std::fill(indices + visible, indices + params.width, -1);
}

}  // namespace

absl::Status C128AMetadata(ThreadPool& pool, const C128AMetadataParams& params) {
  RETURN_IF_ERROR(CheckC128AMetadata(params));
  RETURN_IF_ERROR(CheckVisible(params));
  pool.ParallelFor(params.num_rows,
                   [&](int64_t row) { WriteRow(params, static_cast<int32_t>(row)); });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

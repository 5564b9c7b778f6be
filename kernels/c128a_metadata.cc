#include "kernels/c128a_metadata.h"

#include "absl/strings/str_cat.h"
#include "kernels/sparse_decode.h"

namespace kernels {

int32_t C128AWidth(int32_t max_model_len, int32_t tokens_per_entry) {
  const int32_t entries = max_model_len / tokens_per_entry;
  return (entries + kSparseIndexMultiple - 1) / kSparseIndexMultiple * kSparseIndexMultiple;
}

absl::Status CheckC128AMetadata(const C128AMetadataParams& params) {
  if (params.num_rows < 0 || params.num_decode_rows < 0 ||
      params.num_decode_rows > params.num_rows || params.tokens_per_entry < 1 ||
      params.block_entries < 1 || params.width < 0 || params.index_stride < params.width) {
    return absl::InvalidArgumentError(absl::StrCat(
        "c128a metadata of ", params.num_rows, " rows, ", params.num_decode_rows,
        " of them decodes, ", params.tokens_per_entry, " tokens per entry, ", params.block_entries,
        " entries per block, width ", params.width, ", index stride ", params.index_stride));
  }
  return absl::OkStatus();
}

}  // namespace kernels

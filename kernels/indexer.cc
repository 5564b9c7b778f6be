#include "kernels/indexer.h"

#include "absl/strings/str_cat.h"
#include "kernels/store_kv.h"
#include "status/status_macros.h"

namespace kernels {
namespace {

absl::Status CheckRows(const IndexerRows& rows, int32_t block_entries) {
  if (rows.tokens_per_key <= 0 || rows.top_k <= 0 || block_entries <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: ", rows.tokens_per_key,
                                                   " tokens a key, top_k ", rows.top_k, ", ",
                                                   block_entries, " entries a block"));
  }
  if (rows.positions == nullptr || rows.row_to_seq == nullptr || rows.block_table == nullptr) {
    return absl::InvalidArgumentError("indexer: positions, row_to_seq or block_table is null");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckIndexerLogits(const IndexerLogitsParams& params) {
  if (params.rows.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: ", params.rows.num_rows, " rows"));
  }
  if (params.rows.num_rows == 0) return absl::OkStatus();
  if (params.num_heads <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: ", params.num_heads, " heads"));
  }
  RETURN_IF_ERROR(CheckKvPages(params.pages, params.head_dim, /*rope_dim=*/0));
  RETURN_IF_ERROR(CheckRows(params.rows, params.pages.block_size));
  if (params.q == nullptr || params.weights == nullptr || params.logits == nullptr) {
    return absl::InvalidArgumentError("indexer: q, weights or logits is null");
  }
  return absl::OkStatus();
}

absl::Status CheckTopKSlots(const TopKSlotsParams& params) {
  const IndexerRows& rows = params.rows;
  if (rows.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("top_k_slots: ", rows.num_rows, " rows"));
  }
  if (rows.num_rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRows(rows, params.block_entries));
  if (params.logits == nullptr || params.slots == nullptr || params.slots_width < rows.top_k ||
      (rows.num_rows > 1 && params.slots_stride < params.slots_width)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "top_k_slots: top_k ", rows.top_k, ", ", params.slots_width, " slots a row, stride ",
        params.slots_stride, params.logits == nullptr ? ", no logits" : "",
        params.slots == nullptr ? ", nowhere to write" : ""));
  }
  return absl::OkStatus();
}

}  // namespace kernels

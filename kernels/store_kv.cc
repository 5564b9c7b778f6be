#include "kernels/store_kv.h"

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace kernels {
namespace {

int32_t CeilDiv(int32_t value, int32_t divisor) { return (value + divisor - 1) / divisor; }

absl::Status CheckIndexKey(const IndexKeyParams& params) {
  if (params.dim == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRopeTable(params.rope));
  if (params.rope.rope_dim > params.dim) {
    return absl::InvalidArgumentError(absl::StrCat("store_kv: index keys of ", params.dim,
                                                   " values, ", params.rope.rope_dim, " rotary"));
  }
  if (params.key == nullptr || params.norm_weight == nullptr || params.norm_bias == nullptr) {
    return absl::InvalidArgumentError(
        "store_kv: key, norm_weight or norm_bias of the index keys is null");
  }
  return CheckKvPages(params.pages, params.dim, /*rope_dim=*/0);
}

}  // namespace

int32_t KvEntryBytes(KvFormat format, int32_t dim, int32_t rope_dim) {
  switch (format) {
    case KvFormat::kFloat32:
      return 4 * (dim + rope_dim);
    case KvFormat::kBfloat16:
      return 2 * (dim + rope_dim);
    case KvFormat::kFp8Latent:
    case KvFormat::kFp8IndexKey:
      return dim + 4 * CeilDiv(dim, 128) + 2 * rope_dim;
    case KvFormat::kFp8SharedKv:
      return dim + 2 * rope_dim + CeilDiv(CeilDiv(dim, 64), 8) * 8;
  }
  return 0;
}

int32_t KvBlockMultiple(KvFormat format, int32_t dim, int32_t rope_dim) {
  return format == KvFormat::kFp8SharedKv ? dim + 2 * rope_dim : 1;
}

absl::Status CheckRopeTable(const RopeTable& rope) {
  if (rope.rope_dim < 0 || rope.rope_dim % 2 != 0 || rope.max_positions < 0) {
    return absl::InvalidArgumentError(absl::StrCat("rope table: rope_dim ", rope.rope_dim, ", ",
                                                   rope.max_positions, " positions"));
  }
  if (rope.rope_dim > 0 && (rope.cos == nullptr || rope.sin == nullptr)) {
    return absl::InvalidArgumentError("rope table: no cos or no sin");
  }
  return absl::OkStatus();
}

absl::Status CheckKvPages(const KvPages& pages, int32_t dim, int32_t rope_dim) {
  if (dim <= 0 || rope_dim < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache entries of ", dim, " values and ", rope_dim, " rotary ones"));
  }
  if (pages.format == KvFormat::kFp8IndexKey && rope_dim > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache pages: fp8 index keys have no rotary part, expected 0, is ", rope_dim));
  }
  const int32_t needed = KvEntryBytes(pages.format, dim, rope_dim);
  if (needed <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache pages: unknown format ", static_cast<int>(pages.format)));
  }
  // Where scales stand at the end of a block, there is no room between entries.
  const bool exact =
      pages.format == KvFormat::kFp8IndexKey || pages.format == KvFormat::kFp8SharedKv;
  if (pages.block_size <= 0 || pages.entry_bytes < needed ||
      (exact && pages.entry_bytes != needed)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cache pages: block size ", pages.block_size, " and ", pages.entry_bytes,
        " bytes per entry, where ", dim, " values and ", rope_dim, " rotary ones need ", needed));
  }
  if (pages.base == nullptr || pages.block_stride < int64_t{pages.block_size} * pages.entry_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cache pages: ", pages.base == nullptr ? "no memory, " : "", "block stride ",
        pages.block_stride, " bytes for ", pages.block_size, " entries of ", pages.entry_bytes));
  }
  // float32 entries are read in place.
  if (pages.format == KvFormat::kFloat32 &&
      (pages.entry_bytes % 4 != 0 || pages.block_stride % 4 != 0 ||
       reinterpret_cast<uintptr_t>(pages.base) % 4 != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache pages: float32 entries of ", pages.entry_bytes,
                     " bytes at a block stride of ", pages.block_stride, " are not aligned"));
  }
  return absl::OkStatus();
}

absl::Status CheckStoreKv(const StoreKvParams& params) {
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("store_kv: ", params.num_rows, " rows"));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRopeTable(params.rope));
  RETURN_IF_ERROR(CheckKvPages(params.pages, params.kv_lora_rank, params.rope.rope_dim));
  RETURN_IF_ERROR(CheckIndexKey(params.index_key));
  if (params.kv_a == nullptr || params.norm_weight == nullptr || params.positions == nullptr ||
      params.slots == nullptr) {
    return absl::InvalidArgumentError("store_kv: kv_a, norm_weight, positions or slots is null");
  }
  return absl::OkStatus();
}

absl::Status CheckRope(const RopeParams& params) {
  RETURN_IF_ERROR(CheckRopeTable(params.rope));
  if (params.num_rows < 0 || params.num_heads < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: ", params.num_rows, " rows of ", params.num_heads, " heads"));
  }
  if (params.num_rows == 0 || params.num_heads == 0 || params.rope.rope_dim == 0) {
    return absl::OkStatus();
  }
  if (params.data == nullptr || params.positions == nullptr) {
    return absl::InvalidArgumentError("rope: no data or no positions");
  }
  if (params.norm_dim != 0 && params.norm_dim < params.rope.rope_dim) {
    return absl::InvalidArgumentError(absl::StrCat("rope: a norm over ", params.norm_dim,
                                                   " values that end with ", params.rope.rope_dim,
                                                   " rotary ones"));
  }
  return absl::OkStatus();
}

absl::Status CheckCopyKvEntries(const CopyKvEntriesParams& params) {
  if (params.num_entries < 0 || params.src.format != params.dst.format) {
    return absl::InvalidArgumentError(absl::StrCat(
        "copy_kv_entries: ", params.num_entries, " entries of format ",
        static_cast<int>(params.src.format), " to format ", static_cast<int>(params.dst.format)));
  }
  if (params.num_entries == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckKvPages(params.src, params.dim, params.rope_dim));
  RETURN_IF_ERROR(CheckKvPages(params.dst, params.dim, params.rope_dim));
  if (params.src_slots == nullptr || params.dst_slots == nullptr) {
    return absl::InvalidArgumentError("copy_kv_entries: src_slots or dst_slots is null");
  }
  return absl::OkStatus();
}

absl::Status CheckGatherKv(const GatherKvParams& params) {
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("gather_kv: ", params.num_rows, " rows"));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckKvPages(params.pages, params.kv_lora_rank, params.rope_dim));
  if (params.slots == nullptr || params.latent == nullptr ||
      (params.k_rope == nullptr && params.rope_dim > 0)) {
    return absl::InvalidArgumentError("gather_kv: slots, latent or k_rope is null");
  }
  return absl::OkStatus();
}

}  // namespace kernels

// StoreKv: writes the rows of new tokens into every group of the paged cache.
//
//   latent = rmsnorm(kv_a[0 : rank]; norm_weight, norm_eps)       or of all of kv_a with norm_rope
//   k_rope = R(position) kv_a[rank : rank + rope_dim]
//   page[slot] <- format(latent ++ k_rope)
//
//   index_key = layernorm(key; norm_weight, norm_bias, norm_eps), then its first rope_dim values
//               <- R(position) of them                     V3.2 (models.md 6.1)
//   index page[slot] <- format(index_key)
//
// A row with slot < 0 is skipped.  Interleaved pairs stay interleaved in the cache.
// fp8 (models.md 9.2-9.4): per group of 128 values (kFp8SharedKv: 64) amax = max(|v|, 1e-4), scale
// = amax / 448 rounded up to a power of two; bf16 rounds to nearest even.

#ifndef KERNELS_STORE_KV_H_
#define KERNELS_STORE_KV_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels {

// The index keys of the same rows.
struct IndexKeyParams {
  int32_t dim = 0;                     // index_head_dim; 0: the model has none
  const float* key = nullptr;          // [num_rows, dim]
  int64_t key_row_stride = 0;          // elements
  const float* norm_weight = nullptr;  // [dim]
  const float* norm_bias = nullptr;    // [dim]
  float norm_eps = 1e-6f;
  RopeTable rope;  // rope_dim <= dim
  KvPages pages;   // as many entries a block as the latents
};

struct StoreKvParams {
  int32_t num_rows = 0;
  const float* kv_a = nullptr;  // [num_rows, kv_lora_rank + rope_dim]
  int64_t kv_a_row_stride = 0;  // elements
  int32_t kv_lora_rank = 0;
  const float* norm_weight = nullptr;  // [kv_lora_rank], or + rope_dim with norm_rope
  float norm_eps = 1e-6f;
  bool norm_rope = false;  // V4: the norm covers the rotary values too
  RopeTable rope;
  const int32_t* positions = nullptr;  // [num_rows]
  const int64_t* slots = nullptr;      // [num_rows]; block * block_size + offset, or < 0
  KvPages pages;
  IndexKeyParams index_key = {};
};

// Bytes of one entry of `dim` values and `rope_dim` rotary ones, scales included:
//   kFp8Latent    dim + 4 * ceil(dim / 128) + 2 * rope_dim
//   kFp8IndexKey  dim + 4 * ceil(dim / 128)                      REQUIRES: rope_dim 0
//   kFp8SharedKv  dim + 2 * rope_dim + (ceil(dim / 64) padded to a multiple of 8)
int32_t KvEntryBytes(KvFormat format, int32_t dim, int32_t rope_dim);

// What the bytes of a block's entries are padded to a multiple of: dim + 2 * rope_dim for
// kFp8SharedKv, else 1.
int32_t KvBlockMultiple(KvFormat format, int32_t dim, int32_t rope_dim);

// Rotates rows in place: x[t, h, 0 : rope_dim] <- R(positions[t]) x.  With norm_dim > 0 (V4's queries)
// the norm_dim values of a head that end with the rotary ones are first divided by
// sqrt(mean of their squares + norm_eps).
struct RopeParams {
  int32_t num_rows = 0;
  int32_t num_heads = 0;
  float* data = nullptr;   // first rotary element of row 0, head 0
  int64_t row_stride = 0;  // elements
  int64_t head_stride = 0;
  RopeTable rope;
  const int32_t* positions = nullptr;  // [num_rows]
  int32_t norm_dim = 0;
  float norm_eps = 1e-6f;
};

// What stands between a layer's projections and its attention, in one call: Rope of the queries,
// StoreKv of the new rows, HeadLinear of the queries that are absorbed.  None of them reads what
// another writes.
struct PrepareAttentionParams {
  RopeParams rope;
  StoreKvParams store;
  HeadLinearParams absorb;  // no rows: nothing is absorbed
};

// Copies entries as they are stored: dst entry dst_slots[i] <- src entry src_slots[i].  Both pages have
// the same format.  A slot < 0 on either side is skipped; no entry is both read and written.
struct CopyKvEntriesParams {
  int32_t num_entries = 0;
  const int64_t* src_slots = nullptr;  // [num_entries]
  const int64_t* dst_slots = nullptr;  // [num_entries]
  KvPages src;
  KvPages dst;
  int32_t dim = 0;
  int32_t rope_dim = 0;
};

// Reads entries back (a chunk's context in prefill): row i of the output is the entry of
// slot slots[i], dequantised; a slot < 0 gives zeros.
struct GatherKvParams {
  int32_t num_rows = 0;
  const int64_t* slots = nullptr;  // [num_rows]
  KvPages pages;
  int32_t kv_lora_rank = 0;
  int32_t rope_dim = 0;
  DType dtype = DType::kFloat32;  // of latent and k_rope: AttentionBackend::ragged_kv_dtype or kFloat32
  void* latent = nullptr;         // [num_rows, kv_lora_rank]
  int64_t latent_row_stride = 0;  // elements
  void* k_rope = nullptr;         // [num_rows, rope_dim]
  int64_t k_rope_row_stride = 0;
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckRopeTable(const RopeTable& rope);
absl::Status CheckKvPages(const KvPages& pages, int32_t dim, int32_t rope_dim);
absl::Status CheckStoreKv(const StoreKvParams& params);
absl::Status CheckRope(const RopeParams& params);
absl::Status CheckCopyKvEntries(const CopyKvEntriesParams& params);
absl::Status CheckGatherKv(const GatherKvParams& params);

}  // namespace kernels

#endif  // KERNELS_STORE_KV_H_

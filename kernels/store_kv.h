// StoreKv: writes the latent rows of new tokens into the paged cache.
//
//   latent = rmsnorm(kv_a[0 : rank]; norm_weight, norm_eps)
//   k_rope = R(position) kv_a[rank : rank + rope_dim]
//   page[slot] <- format(latent ++ k_rope)
//
// A row with slot < 0 is skipped.  Interleaved pairs stay interleaved in the cache.
// fp8 (models.md 9.2): one scale per 128 latent values, amax = max(|v|, 1e-4), scale = amax / 448
// rounded up to a power of two, stored as float32; k_rope as bf16 (round to nearest even).

#ifndef KERNELS_STORE_KV_H_
#define KERNELS_STORE_KV_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace kernels {

struct StoreKvParams {
  int32_t num_rows = 0;
  const float* kv_a = nullptr;           // [num_rows, kv_lora_rank + rope_dim]
  int64_t kv_a_row_stride = 0;           // elements
  int32_t kv_lora_rank = 0;
  const float* norm_weight = nullptr;    // [kv_lora_rank]
  float norm_eps = 1e-6f;
  RopeTable rope;
  const int32_t* positions = nullptr;    // [num_rows]
  const int64_t* slots = nullptr;        // [num_rows]; block * block_size + offset, or < 0
  KvPages pages;
};

// Bytes of one latent entry: rank + 4 * ceil(rank / 128) + 2 * rope for fp8.
int32_t LatentEntryBytes(KvFormat format, int32_t kv_lora_rank, int32_t rope_dim);

// Rotates rows in place: x[t, h, 0 : rope_dim] <- R(positions[t]) x.
struct RopeParams {
  int32_t num_rows = 0;
  int32_t num_heads = 0;
  float* data = nullptr;                 // first rotary element of row 0, head 0
  int64_t row_stride = 0;                // elements
  int64_t head_stride = 0;
  RopeTable rope;
  const int32_t* positions = nullptr;    // [num_rows]
};

// Reads entries back as float32 (a chunk's context in prefill): row i of the output is the entry of
// slot slots[i], dequantised; a slot < 0 gives zeros.
struct GatherKvParams {
  int32_t num_rows = 0;
  const int64_t* slots = nullptr;        // [num_rows]
  KvPages pages;
  int32_t kv_lora_rank = 0;
  int32_t rope_dim = 0;
  float* latent = nullptr;               // [num_rows, kv_lora_rank]
  int64_t latent_row_stride = 0;         // elements
  float* k_rope = nullptr;               // [num_rows, rope_dim]
  int64_t k_rope_row_stride = 0;
};

}  // namespace kernels

#endif  // KERNELS_STORE_KV_H_

// One entry of a cache group as bytes, in each KvFormat: `dim` values (a latent, an index key, V4's
// shared K = V), then `rope_dim` rotary ones.
//
// Thread-safe: pure functions.

#ifndef KERNELS_CPU_KV_ENTRY_H_
#define KERNELS_CPU_KV_ENTRY_H_

#include <cstddef>
#include <cstdint>

#include "kernels/store_kv.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// e4m3fn: nearest, ties to even; beyond 448 saturates, infinities too; NaN stays NaN.  The way back
// and bf16 are in convert.h.
uint8_t E4m3FromFloat(float value);

// The scale of one group of values in an fp8 format, from its largest magnitude:
// max(amax, 1e-4) / 448, rounded up to a power of two.
float Float8GroupScale(float amax);

// Where an entry lies.  REQUIRES: slot >= 0.
struct EntryPlace {
  std::byte* block = nullptr;  // base + block id * block_stride
  int64_t entry = 0;           // within the block
};
inline EntryPlace PlaceOfSlot(const KvPages& pages, int64_t slot) {
  return {pages.base + slot / pages.block_size * pages.block_stride, slot % pages.block_size};
}
// Its first byte, in the formats that keep an entry's bytes together (all but kFp8IndexKey and
// kFp8SharedKv).
inline std::byte* EntryAt(const KvPages& pages, const EntryPlace& place) {
  return place.block + place.entry * pages.entry_bytes;
}

// values [dim], rope [rope_dim] -> the entry at `place`; no other byte is written.
// REQUIRES: CheckKvPages is ok.
void StoreEntry(const KvPages& pages, const EntryPlace& place, const float* values, int32_t dim,
                const float* rope, int32_t rope_dim);
// The inverse.  Accepts any float32 scale, not only powers of two.
void LoadEntry(const KvPages& pages, const EntryPlace& place, int32_t dim, int32_t rope_dim,
               float* values, float* rope);

// The entry's bytes, from pages to others of the same format.
void CopyEntry(const KvPages& from, const EntryPlace& source, const KvPages& to,
               const EntryPlace& target, int32_t dim, int32_t rope_dim);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_KV_ENTRY_H_

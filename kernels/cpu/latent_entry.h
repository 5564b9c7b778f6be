// One entry of a latent cache as bytes: `rank` latent values, then `rope_dim` rotary ones, in each
// KvFormat.
//
// Thread-safe: pure functions.

#ifndef KERNELS_CPU_LATENT_ENTRY_H_
#define KERNELS_CPU_LATENT_ENTRY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace kernels::cpu {

// e4m3fn: nearest, ties to even; beyond 448 saturates, infinities too; NaN stays NaN.  The way back
// and bf16 are in convert.h.
uint8_t E4m3FromFloat(float value);

// The scale of one group of latent values in kFp8Latent, from its largest magnitude:
// max(amax, 1e-4) / 448, rounded up to a power of two.
float Float8GroupScale(float amax);

inline constexpr int32_t kFloat8GroupSize = 128;  // latent values that share a scale

// latent [rank], k_rope [rope_dim] -> the first LatentEntryBytes of `entry`.  Needs no alignment.
void EncodeEntry(KvFormat format, const float* latent, int32_t rank, const float* k_rope,
                 int32_t rope_dim, std::byte* entry);
// The inverse.  kFp8Latent accepts any scale, not only powers of two.
void DecodeEntry(KvFormat format, const std::byte* entry, int32_t rank, int32_t rope_dim,
                 float* latent, float* k_rope);

// Errors: kInvalidArgument if pages cannot hold entries of these sizes.
absl::Status CheckLatentPages(const KvPages& pages, int32_t rank, int32_t rope_dim);

// REQUIRES: slot >= 0.
inline std::byte* EntryOfSlot(const KvPages& pages, int64_t slot) {
  return pages.base + slot / pages.block_size * pages.block_stride +
         slot % pages.block_size * pages.entry_bytes;
}

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_LATENT_ENTRY_H_

#include "kernels/cpu/latent_entry.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"
#include "kernels/store_kv.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace kernels::cpu {
namespace {

constexpr float kFloat8Max = 448.0f;
constexpr uint8_t kFloat8MaxBits = 0x7e;
constexpr uint8_t kFloat8NanBits = 0x7f;

struct E4m3Table {
  float values[256];
  E4m3Table() {
    for (int bits = 0; bits < 256; ++bits) values[bits] = FloatFromE4m3(static_cast<uint8_t>(bits));
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
bool HasF16c() {
  static const bool supported = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return supported;
}

// Codes [0, count / 8 * 8); returns how many that was.  An e4m3 code is the top of a half-precision
// number whose exponent has a bias of 15 instead of 7, subnormals too.
__attribute__((target("avx,f16c"))) int32_t DecodeE4m3F16c(const uint8_t* codes, int32_t count,
                                                           float scale, float* out) {
  const __m128i low_bits = _mm_set1_epi16(0x7f);
  int32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i code =
        _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m128i magnitude = _mm_and_si128(code, low_bits);
    const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(low_bits, code), 8);
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, low_bits), _mm_set1_epi16(0x7e00));
    const __m128i half = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(magnitude, 7));
    const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p8f));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(value, _mm256_set1_ps(scale)));
  }
  return i;
}
#else
bool HasF16c() { return false; }
int32_t DecodeE4m3F16c(const uint8_t*, int32_t, float, float*) { return 0; }
#endif

// out[i] = value of codes[i] * scale.
void DecodeE4m3(const uint8_t* codes, int32_t count, float scale, float* out) {
  static const E4m3Table table;
  int32_t i = HasF16c() ? DecodeE4m3F16c(codes, count, scale, out) : 0;
  for (; i < count; ++i) out[i] = table.values[codes[i]] * scale;
}

int32_t NumGroups(int32_t rank) { return (rank + kFloat8GroupSize - 1) / kFloat8GroupSize; }

// `count` may be 0, and the pointer then null.
void StoreFloat32(const float* values, int32_t count, std::byte* out) {
  if (count > 0) std::memcpy(out, values, sizeof(float) * static_cast<size_t>(count));
}

void LoadFloat32(const std::byte* bytes, int32_t count, float* out) {
  if (count > 0) std::memcpy(out, bytes, sizeof(float) * static_cast<size_t>(count));
}

void StoreBfloat16(const float* values, int32_t count, std::byte* out) {
  for (int32_t i = 0; i < count; ++i) {
    const uint16_t bits = Bfloat16FromFloat(values[i]);
    std::memcpy(out + 2 * i, &bits, sizeof(bits));
  }
}

void LoadBfloat16(const std::byte* bytes, int32_t count, float* out) {
  for (int32_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    out[i] = FloatFromBfloat16(bits);
  }
}

void EncodeFloat8(const float* latent, int32_t rank, const float* k_rope, int32_t rope_dim,
                  std::byte* entry) {
  std::byte* scales = entry + rank;
  for (int32_t group = 0; group < NumGroups(rank); ++group) {
    const int32_t begin = group * kFloat8GroupSize;
    const int32_t end = std::min(begin + kFloat8GroupSize, rank);
    float amax = 0;
    for (int32_t i = begin; i < end; ++i) amax = std::max(amax, std::fabs(latent[i]));
    const float scale = Float8GroupScale(amax);
    std::memcpy(scales + 4 * group, &scale, sizeof(scale));
    const float inverse = 1.0f / scale;  // a power of two as well: products are exact
    for (int32_t i = begin; i < end; ++i) {
      entry[i] = static_cast<std::byte>(E4m3FromFloat(latent[i] * inverse));
    }
  }
  StoreBfloat16(k_rope, rope_dim, scales + 4 * NumGroups(rank));
}

void DecodeFloat8(const std::byte* entry, int32_t rank, int32_t rope_dim, float* latent,
                  float* k_rope) {
  const std::byte* scales = entry + rank;
  for (int32_t group = 0; group < NumGroups(rank); ++group) {
    float scale;
    std::memcpy(&scale, scales + 4 * group, sizeof(scale));
    const int32_t begin = group * kFloat8GroupSize;
    const int32_t end = std::min(begin + kFloat8GroupSize, rank);
    DecodeE4m3(reinterpret_cast<const uint8_t*>(entry) + begin, end - begin, scale, latent + begin);
  }
  LoadBfloat16(scales + 4 * NumGroups(rank), rope_dim, k_rope);
}

}  // namespace

uint8_t E4m3FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude_bits = bits & 0x7fffffff;
  if (magnitude_bits > 0x7f800000) return sign | kFloat8NanBits;
  const float magnitude = std::bit_cast<float>(magnitude_bits);
  if (magnitude >= kFloat8Max) return sign | kFloat8MaxBits;
  if (magnitude < 0x1p-6f) {
    // Subnormal: multiples of 2^-9.  At 2^14 a float's last bit is worth 2^-9, so the sum rounds.
    const uint32_t rounded = std::bit_cast<uint32_t>(magnitude + 0x1p14f);
    return sign | static_cast<uint8_t>(rounded - std::bit_cast<uint32_t>(0x1p14f));
  }
  // Keep 3 of 23 mantissa bits, ties to even, and move the exponent's bias from 127 to 7.
  const uint32_t rounded = magnitude_bits + 0x7ffff + (magnitude_bits >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - ((127 - 7) << 3));
}

float Float8GroupScale(float amax) {
  const float scale = std::max(amax, 1e-4f) / kFloat8Max;
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  if (bits >= 0x7f000000) return scale;  // no power of two above it is finite
  return std::bit_cast<float>((bits + 0x7fffff) & 0x7f800000);
}

void EncodeEntry(KvFormat format, const float* latent, int32_t rank, const float* k_rope,
                 int32_t rope_dim, std::byte* entry) {
  switch (format) {
    case KvFormat::kFloat32:
      StoreFloat32(latent, rank, entry);
      StoreFloat32(k_rope, rope_dim, entry + 4 * rank);
      return;
    case KvFormat::kBfloat16:
      StoreBfloat16(latent, rank, entry);
      StoreBfloat16(k_rope, rope_dim, entry + 2 * rank);
      return;
    case KvFormat::kFp8Latent:
      EncodeFloat8(latent, rank, k_rope, rope_dim, entry);
      return;
  }
}

void DecodeEntry(KvFormat format, const std::byte* entry, int32_t rank, int32_t rope_dim,
                 float* latent, float* k_rope) {
  switch (format) {
    case KvFormat::kFloat32:
      LoadFloat32(entry, rank, latent);
      LoadFloat32(entry + 4 * rank, rope_dim, k_rope);
      return;
    case KvFormat::kBfloat16:
      LoadBfloat16(entry, rank, latent);
      LoadBfloat16(entry + 2 * rank, rope_dim, k_rope);
      return;
    case KvFormat::kFp8Latent:
      DecodeFloat8(entry, rank, rope_dim, latent, k_rope);
      return;
  }
}

absl::Status CheckLatentPages(const KvPages& pages, int32_t rank, int32_t rope_dim) {
  if (rank <= 0 || rope_dim < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("latent entry: rank ", rank, " and rope_dim ", rope_dim));
  }
  const int32_t needed = LatentEntryBytes(pages.format, rank, rope_dim);
  if (needed <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache pages: unknown format ", static_cast<int>(pages.format)));
  }
  if (pages.block_size <= 0 || pages.entry_bytes < needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cache pages: block size ", pages.block_size, " and ", pages.entry_bytes,
        " bytes per entry, where rank ", rank, " and rope_dim ", rope_dim, " need ", needed));
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

}  // namespace kernels::cpu

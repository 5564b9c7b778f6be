#include "kernels/cpu/kv_entry.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/convert.h"

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

// How many values share a scale.
constexpr int32_t kGroupSize = 128;
constexpr int32_t kSharedKvGroupSize = 64;

int32_t NumGroups(int32_t dim, int32_t group_size) { return (dim + group_size - 1) / group_size; }

// Where the parts of an fp8 entry lie.
struct Float8Parts {
  std::byte* values;  // [dim] e4m3
  std::byte* scales;  // float32, or bytes 2^(byte - 127) in kFp8SharedKv
  std::byte* rope;    // [rope_dim] bf16
};

// REQUIRES: an fp8 format.
Float8Parts PartsOf(const KvPages& pages, const EntryPlace& place, int32_t dim, int32_t rope_dim) {
  if (pages.format == KvFormat::kFp8Latent) {
    std::byte* values = EntryAt(pages, place);
    std::byte* scales = values + dim;
    return {values, scales, scales + 4 * NumGroups(dim, kGroupSize)};
  }
  const int64_t row_bytes = dim + 2 * int64_t{rope_dim};  // of an entry without its scales
  std::byte* values = place.block + place.entry * row_bytes;
  std::byte* scales =
      place.block + pages.block_size * row_bytes + place.entry * (pages.entry_bytes - row_bytes);
  return {values, scales, values + dim};
}

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

void StoreFloat8(const KvPages& pages, const EntryPlace& place, const float* values, int32_t dim,
                 const float* rope, int32_t rope_dim) {
  const bool byte_scales = pages.format == KvFormat::kFp8SharedKv;
  const int32_t group_size = byte_scales ? kSharedKvGroupSize : kGroupSize;
  const int32_t num_groups = NumGroups(dim, group_size);
  const Float8Parts parts = PartsOf(pages, place, dim, rope_dim);
  if (byte_scales) {
    std::memset(parts.scales, 0, static_cast<size_t>(pages.entry_bytes - dim - 2 * rope_dim));
  }
  for (int32_t group = 0; group < num_groups; ++group) {
    const int32_t begin = group * group_size;
    const int32_t end = std::min(begin + group_size, dim);
    float amax = 0;
    for (int32_t i = begin; i < end; ++i) amax = std::max(amax, std::fabs(values[i]));
    const float scale = Float8GroupScale(amax);
    if (byte_scales) {  // a power of two: its exponent, bias included; infinite becomes NaN
      parts.scales[group] = static_cast<std::byte>(std::bit_cast<uint32_t>(scale) >> 23);
    } else {
      std::memcpy(parts.scales + 4 * group, &scale, sizeof(scale));
    }
    const float inverse = 1.0f / scale;  // a power of two as well: products are exact
    for (int32_t i = begin; i < end; ++i) {
      parts.values[i] = static_cast<std::byte>(E4m3FromFloat(values[i] * inverse));
    }
  }
  StoreBfloat16(rope, rope_dim, parts.rope);
}

void LoadFloat8(const KvPages& pages, const EntryPlace& place, int32_t dim, int32_t rope_dim,
                float* values, float* rope) {
  const bool byte_scales = pages.format == KvFormat::kFp8SharedKv;
  const int32_t group_size = byte_scales ? kSharedKvGroupSize : kGroupSize;
  const Float8Parts parts = PartsOf(pages, place, dim, rope_dim);
  for (int32_t group = 0; group < NumGroups(dim, group_size); ++group) {
    float scale;
    if (byte_scales) {
      scale = FloatFromE8m0(static_cast<uint8_t>(parts.scales[group]));
    } else {
      std::memcpy(&scale, parts.scales + 4 * group, sizeof(scale));
    }
    const int32_t begin = group * group_size;
    const int32_t end = std::min(begin + group_size, dim);
    DecodeE4m3(reinterpret_cast<const uint8_t*>(parts.values) + begin, end - begin, scale,
               values + begin);
  }
  LoadBfloat16(parts.rope, rope_dim, rope);
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

void StoreEntry(const KvPages& pages, const EntryPlace& place, const float* values, int32_t dim,
                const float* rope, int32_t rope_dim) {
  std::byte* entry = EntryAt(pages, place);
  switch (pages.format) {
    case KvFormat::kFloat32:
      StoreFloat32(values, dim, entry);
      StoreFloat32(rope, rope_dim, entry + 4 * dim);
      return;
    case KvFormat::kBfloat16:
      StoreBfloat16(values, dim, entry);
      StoreBfloat16(rope, rope_dim, entry + 2 * dim);
      return;
    case KvFormat::kFp8Latent:
    case KvFormat::kFp8IndexKey:
    case KvFormat::kFp8SharedKv:
      StoreFloat8(pages, place, values, dim, rope, rope_dim);
      return;
  }
}

void LoadEntry(const KvPages& pages, const EntryPlace& place, int32_t dim, int32_t rope_dim,
               float* values, float* rope) {
  const std::byte* entry = EntryAt(pages, place);
  switch (pages.format) {
    case KvFormat::kFloat32:
      LoadFloat32(entry, dim, values);
      LoadFloat32(entry + 4 * dim, rope_dim, rope);
      return;
    case KvFormat::kBfloat16:
      LoadBfloat16(entry, dim, values);
      LoadBfloat16(entry + 2 * dim, rope_dim, rope);
      return;
    case KvFormat::kFp8Latent:
    case KvFormat::kFp8IndexKey:
    case KvFormat::kFp8SharedKv:
      LoadFloat8(pages, place, dim, rope_dim, values, rope);
      return;
  }
}

void CopyEntry(const KvPages& from, const EntryPlace& source, const KvPages& to,
               const EntryPlace& target, int32_t dim, int32_t rope_dim) {
  const auto bytes = static_cast<size_t>(KvEntryBytes(from.format, dim, rope_dim));
  if (from.format != KvFormat::kFp8IndexKey && from.format != KvFormat::kFp8SharedKv) {
    std::memcpy(EntryAt(to, target), EntryAt(from, source), bytes);
    return;
  }
  const Float8Parts in = PartsOf(from, source, dim, rope_dim);
  const Float8Parts out = PartsOf(to, target, dim, rope_dim);
  const size_t row_bytes = dim + 2 * static_cast<size_t>(rope_dim);
  std::memcpy(out.values, in.values, row_bytes);
  std::memcpy(out.scales, in.scales, bytes - row_bytes);
}

}  // namespace kernels::cpu

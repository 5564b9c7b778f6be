// The inner loops of every matrix product, one table of functions per instruction set.
//
// Weights lie in panels of 32 output columns.  A panel is cut along the inner dimension into chunks
// (packed_matrix.h); within a chunk
//   bf16, e4m3, e2m1: [ceil(count / 2)][32 columns][2 inner]   two steps lie together, so that one
//                                                              load and a shift or a mask give both
//   f16, float32:     [count][32 columns]
// e2m1: the two steps share a byte, the first in its low four bits, as in a checkpoint.  An odd
// last step is padded with zero weights; its activation is never read.
//
// Every function adds in the same order: for each output, one accumulator, inner index ascending.
// With scales the accumulator starts at 0 and c += accumulator * scale; without, it starts at c. So
// a row's result is the same bits whichever function and tile computed it (within one table).
//
// e4m3 weights come out of these functions multiplied by kE4m3Unit; packed scales make up for it.

#ifndef KERNELS_CPU_MATRIX_KERNELS_H_
#define KERNELS_CPU_MATRIX_KERNELS_H_

#include <cstdint>

namespace kernels::cpu {

inline constexpr int32_t kPanelColumns = 32;
inline constexpr int32_t kTileRows = 6;       // rows of one MultiplyTile
inline constexpr int32_t kMaxDirectRows = 2;  // rows of one MultiplyRows
// e4m3 bits shifted into float16's place mean value * 2^-8: the exponent biases are 7 and 15.
inline constexpr float kE4m3Unit = 0x1p-8f;

enum class StoredFormat : uint8_t { kFloat32, kFloat16, kBfloat16, kE4m3, kE2m1 };
inline constexpr int32_t kNumStoredFormats = 5;

// Inner steps that lie together.
constexpr int64_t InnerStep(StoredFormat format) {
  return format == StoredFormat::kFloat32 || format == StoredFormat::kFloat16 ? 1 : 2;
}
// Bytes of `steps` inner steps of a panel, a multiple of InnerStep(format).
constexpr int64_t StoredBytes(StoredFormat format, int64_t steps) {
  const int64_t bits = format == StoredFormat::kFloat32 ? 32
                       : format == StoredFormat::kE4m3  ? 8
                       : format == StoredFormat::kE2m1  ? 4
                                                        : 16;
  return steps * kPanelColumns * bits / 8;
}

// c[r][0:32] += sum_k rows[r][k_begin + k] * weights[k][0:32], straight from the stored weights.
using MultiplyRowsFn = void (*)(const float* const* rows, int32_t num_rows /* 1..kMaxDirectRows */,
                                int64_t k_begin, int64_t count, const void* weights,
                                const float* scales /* [32]; may be null */,
                                float* c /* [num_rows][32] */);

// Stored weights of a chunk, or of an even-numbered piece of it, to expanded[count][32].
using ExpandFn = void (*)(const void* weights, int64_t count, float* expanded);

// As MultiplyRowsFn, from expanded weights.
using MultiplyTileFn = void (*)(const float* const* rows, int32_t num_rows /* 1..kTileRows */,
                                int64_t k_begin, int64_t count, const float* expanded,
                                const float* scales, float* c);

// out[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit); limit 0: no clamp.
using SwiGluFn = void (*)(const float* gate, const float* up, int64_t n, float limit, float* out);

struct MatrixKernels {
  const char* name;
  MultiplyRowsFn multiply_rows[kNumStoredFormats];  // by StoredFormat
  ExpandFn expand[kNumStoredFormats];
  MultiplyTileFn multiply_tile;
  SwiGluFn swiglu;
  bool keeps_e4m3_nan;  // false: NaN bytes come out as numbers, the caller must not pass them
};

// Plain C++, for every machine.
const MatrixKernels& GenericMatrixKernels();
// AVX2 + FMA + F16C; null if this machine or build has none.
const MatrixKernels* Avx2MatrixKernels();
// The fastest table for this machine.
const MatrixKernels& BestMatrixKernels();

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_MATRIX_KERNELS_H_

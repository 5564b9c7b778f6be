// What operations take: activations, checkpoint tensors, cache pages, and the context of a launch.
// Plain views: none of them owns memory.

#ifndef KERNELS_TENSOR_H_
#define KERNELS_TENSOR_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace kernels {

// Every launch takes one.  A launch allocates nothing and synchronises nothing.
struct LaunchContext {
  void* stream = nullptr;               // CUDA stream; null on CPU, where a launch runs to its end
  bool programmatic_dependency = false;  // may start before its predecessor has finished (CUDA)
};

// Rows of activations: [num_rows, columns], `row_stride` elements from row to row.
// `scales` belong to fp8 rows only: M-major, float32 [ceil(columns / 128), scale_stride],
// scale_stride a multiple of 4; value = stored * scale.
struct Activation {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;               // elements
  const float* scales = nullptr;        // may be null: unscaled
  int64_t scale_stride = 0;             // elements
};

// A matrix as the checkpoint stores it: [rows, cols] row-major, y = W x with W [out, in].  Host memory
// (usually a mapped file) that must outlive the packed object made from it.
// Scales multiply: w = stored * scale[row / scale_block_rows][col / scale_block_cols].
struct WeightTensor {
  const void* data = nullptr;
  DType dtype = DType::kBfloat16;
  int64_t rows = 0;
  int64_t cols = 0;                     // logical columns (fp4: two a byte)
  const void* scales = nullptr;         // null: unscaled; [ceil(rows/br), ceil(cols/bc)] row-major
  DType scale_dtype = DType::kFloat32;  // kFloat32 or kFloat8E8m0
  int64_t scale_block_rows = 128;
  int64_t scale_block_cols = 128;
};

// How the entries of a cache group are stored (models.md 9).  An entry is `dim` values and after them
// `rope_dim` rotary ones, which fp8 formats keep as bf16.  Scales multiply: value = stored * scale.
enum class KvFormat : uint8_t {
  kFloat32,      // values as float32
  kBfloat16,     // values as bf16
  kFp8Latent,    // e4m3 values, float32 scales (one per 128 values), rotary ones (656 B at 512 + 64)
  kFp8IndexKey,  // no rotary ones.  Of a block: every entry's e4m3 values, then every entry's float32
                 // scales, one per 128 values (132 B at 128)
  kFp8SharedKv,  // V4's K = V.  Of a block: every entry's e4m3 values and rotary ones, then every
                 // entry's scale bytes 2^(byte - 127), one per 64 values, padded with zeros to a
                 // multiple of 8 (584 B at 448 + 64)
};

// One (group, layer) of the block-major cache: block b starts at base + b * block_stride; in the
// first three formats entry i of it lies i * entry_bytes further on.
struct KvPages {
  std::byte* base = nullptr;            // of this layer in block 0
  int64_t block_stride = 0;             // bytes
  int32_t block_size = 0;               // entries of a block (tokens, where every token has one)
  int32_t entry_bytes = 0;              // scales included
  KvFormat format = KvFormat::kFloat32;
};

// Rotary tables: cos and sin, float32 [max_positions, rope_dim / 2], attention factor applied.
enum class RopeLayout : uint8_t {
  kInterleaved,  // pairs (x0, x1), (x2, x3), ...
  kHalfSplit,    // pairs (x_i, x_{i + rope_dim / 2})
};
struct RopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int32_t rope_dim = 0;
  int32_t max_positions = 0;
  RopeLayout layout = RopeLayout::kInterleaved;
};

}  // namespace kernels

#endif  // KERNELS_TENSOR_H_

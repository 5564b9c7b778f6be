// SparseDecode and SparsePrefill: attention of each query row over its own list of cache entries.
//
//   score[t, h, i] = softmax_scale * (q[t, h] . key_i[0 : dim] + q_rope[t, h] . key_i[dim : dim +
//   rope_dim]) o[t, h]        = sum_i softmax_i(score) * key_i[0 : value_dim] with a sink:     the
//   softmax's denominator also has exp(sink[h]); the sink has no value inverse RoPE:    last
//   rope_dim values of o[t, h] <- R(-position[t]) of them out[t, h]      = W_UV_h o[t, h] if w_uv
//   is given, else out = o
//
// over the entries i that the row's indices name, in up to two sources (V4: window and compressed
// entries, whose formats, pages and lists are their own).  V3.2: dim = value_dim = kv_lora_rank,
// one source, w_uv.  V4: value_dim = dim + rope_dim, a sink, inverse RoPE.
//
// An index is a global slot: block * pages.block_size + entry.  Anything outside [0, num_slots) is
// no entry (-1 pads) and is never dereferenced; nor is anything at or past the row's length.
// Indices are taken in the order given, source by source; a row's bits depend on the entries alone,
// not on the padding between them, the width, or the other rows of the call.  A row without entries
// gives output exactly 0 and lse -inf.  lse does not count the sink.
//
// SparseDecode is for few rows (a backend may share out one row's entries), SparsePrefill for many;
// they compute the same.  Sources: models.md 4.3, 6.2, 7.3.

#ifndef KERNELS_SPARSE_DECODE_H_
#define KERNELS_SPARSE_DECODE_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels {

// Lists of indices are padded with -1 to a multiple of this.
inline constexpr int32_t kSparseIndexMultiple = 128;

struct SparseSource {
  KvPages pages;
  const int32_t* indices = nullptr;  // [num_rows, index_stride]; null: no such source
  int64_t index_stride = 0;          // elements
  int32_t width = 0;                 // indices of a row, padding included
  const int32_t* lengths = nullptr;  // [num_rows], how many of them count; may be null: width
  int64_t num_slots = std::numeric_limits<int64_t>::max();
};

struct SparseDecodeParams {
  int32_t num_rows = 0;
  int32_t num_heads = 0;
  int32_t dim = 0;
  int32_t rope_dim = 0;
  int32_t value_dim = 0;   // <= dim + rope_dim
  int32_t v_head_dim = 0;  // with w_uv
  float softmax_scale = 0;
  SparseSource sources[2] = {};
  const float* q = nullptr;  // [num_rows, num_heads, dim]
  int64_t q_row_stride = 0;  // elements
  int64_t q_head_stride = 0;
  const float* q_rope = nullptr;  // [num_rows, num_heads, rope_dim]
  int64_t q_rope_row_stride = 0;
  int64_t q_rope_head_stride = 0;
  const float* sink = nullptr;             // [num_heads], not scaled; may be null
  RopeTable inverse_rope = {};             // rope_dim 0: none
  const int32_t* positions = nullptr;      // [num_rows], for inverse_rope; < 0: a padded row
  const PackedHeadLinear* w_uv = nullptr;  // may be null
  float* out = nullptr;                    // [num_rows, num_heads, v_head_dim or value_dim]
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;  // [num_heads, lse_stride]; may be null
  int64_t lse_stride = 0;
  std::byte* workspace = nullptr;  // AttentionBackend::SparseDecodeWorkspaceBytes
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckSparseDecode(const SparseDecodeParams& params);

}  // namespace kernels

#endif  // KERNELS_SPARSE_DECODE_H_

// RaggedMha: unabsorbed attention of several sequences laid end to end.
//
//   score[t, h, j] = softmax_scale * (q_nope[t, h] . k_nope[j, h] + q_rope[t, h] . k_rope[j])
//   out[t, h]      = sum_j softmax_j(score) * v[j, h]
//   lse[h, t]      = log sum_j exp(score)                 natural log, scale applied
//
// over the keys j of t's own sequence that it may see.  Query row i of sequence s (i from 0) sees key
// j (from 0) iff j <= i + causal_offset[s]; without causal_offset the alignment is bottom-right:
// causal_offset[s] = kv_len[s] - q_len[s].  An offset lets keys come in pieces: with `accumulate`, out
// and lse hold the result over earlier keys and are merged with this call's by log-sum-exp.
// A row that sees nothing gives out 0 and lse -inf (with accumulate: stays as it was).
//
// Keys are taken in ascending order in tiles that start at the piece's first key, so that a row's
// result depends only on the pieces it was given, never on the other rows of the call.

#ifndef KERNELS_RAGGED_MHA_H_
#define KERNELS_RAGGED_MHA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace kernels {

// All strides in elements.
struct RaggedMhaParams {
  int32_t num_seqs = 0;
  int32_t num_rows = 0;                    // cu_seqlens_q[num_seqs], which only the device may read
  int32_t num_heads = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  float softmax_scale = 0;
  const int32_t* cu_seqlens_q = nullptr;   // [num_seqs + 1], first 0
  const int32_t* cu_seqlens_kv = nullptr;  // [num_seqs + 1], first 0
  const int32_t* causal_offset = nullptr;  // [num_seqs]; may be null: bottom-right
  const int32_t* q_row_begin = nullptr;    // [num_seqs] row of a sequence's first query in q, out and
                                           // lse; may be null: cu_seqlens_q
  const float* q_nope = nullptr;           // [total_q, num_heads, qk_nope_head_dim]
  int64_t q_nope_row_stride = 0;
  int64_t q_nope_head_stride = 0;
  const float* q_rope = nullptr;           // [total_q, num_heads, qk_rope_head_dim]
  int64_t q_rope_row_stride = 0;
  int64_t q_rope_head_stride = 0;
  DType kv_dtype = DType::kFloat32;        // of k_nope, k_rope and v: AttentionBackend::ragged_kv_dtype
                                           // or kFloat32
  int32_t num_keys = 0;                    // cu_seqlens_kv[num_seqs]; used unless kv_dtype is kFloat32
  const void* k_nope = nullptr;            // [total_kv, num_heads, qk_nope_head_dim]
  int64_t k_nope_row_stride = 0;
  int64_t k_nope_head_stride = 0;
  const void* k_rope = nullptr;            // [total_kv, qk_rope_head_dim], one for all heads
  int64_t k_rope_row_stride = 0;
  const void* v = nullptr;                 // [total_kv, num_heads, v_head_dim]
  int64_t v_row_stride = 0;
  int64_t v_head_stride = 0;
  float* out = nullptr;                    // [total_q, num_heads, v_head_dim]
  uint16_t* rounded_out = nullptr;         // instead of out: the same in bf16; not with accumulate,
                                           // not on the CPU
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;                    // [num_heads, lse_stride]; may be null unless accumulate
  int64_t lse_stride = 0;                  // elements from head to head, >= total_q
  bool accumulate = false;
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckRaggedMha(const RaggedMhaParams& params);

}  // namespace kernels

#endif  // KERNELS_RAGGED_MHA_H_

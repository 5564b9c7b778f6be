// AbsorbedDecode: attention of the latent itself, straight from the paged cache.
//
//   score[t, h, j] = softmax_scale * (q_latent[t, h] . latent[j] + q_rope[t, h] . k_rope[j])
//   o[t, h]        = sum_j softmax_j(score) * latent[j]
//   out_v[t, h]    = W_UV_h o[t, h]                        if w_uv is given, else out = o
//
// Row t of a sequence with q_len rows and kv_len keys sees keys j <= kv_len - q_len + (row within the
// sequence).  Keys are read in ranges ("splits") made by the host; splitting and combining is invisible
// in the result's contract.  A row with kv_len 0 gives output 0 and lse -inf.
//
// Source: DeepSeek-V2 paper 2.1; models.md 4.3.

#ifndef KERNELS_ABSORBED_DECODE_H_
#define KERNELS_ABSORBED_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels {

// Keys [kv_begin, kv_end) of sequence `seq`, for all its rows.  Splits of a sequence are adjacent and
// ascending; the plan makes them from kv_len alone, so a sequence's result does not depend on its batch.
struct DecodeSplit {
  int32_t seq = 0;
  int32_t kv_begin = 0;
  int32_t kv_end = 0;
};

struct AbsorbedDecodeParams {
  int32_t num_seqs = 0;
  int32_t num_rows = 0;                    // cu_seqlens_q[num_seqs], which only the device may read
  int32_t max_q_len = 0;                   // no sequence has more rows
  int32_t num_heads = 0;
  int32_t kv_lora_rank = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  float softmax_scale = 0;
  const int32_t* cu_seqlens_q = nullptr;   // [num_seqs + 1]
  const int32_t* kv_len = nullptr;         // [num_seqs], new rows included
  const int32_t* block_table = nullptr;    // [num_seqs, block_table_stride], -1 past the end
  int64_t block_table_stride = 0;          // elements
  const DecodeSplit* splits = nullptr;     // [num_splits]
  int32_t num_splits = 0;
  int32_t max_splits_per_seq = 0;          // no sequence has more
  KvPages pages;
  const float* q_latent = nullptr;         // [total_q, num_heads, kv_lora_rank]
  int64_t q_latent_row_stride = 0;         // elements
  int64_t q_latent_head_stride = 0;
  const float* q_rope = nullptr;           // [total_q, num_heads, qk_rope_head_dim]
  int64_t q_rope_row_stride = 0;
  int64_t q_rope_head_stride = 0;
  const PackedHeadLinear* w_uv = nullptr;  // may be null
  float* out = nullptr;                    // [total_q, num_heads, v_head_dim or kv_lora_rank]
  uint16_t* rounded_out = nullptr;         // instead of out: the same in bf16; with w_uv, not on the CPU
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;                    // [num_heads, lse_stride]; may be null
  int64_t lse_stride = 0;
  std::byte* workspace = nullptr;          // Backend::AbsorbedDecodeWorkspaceBytes
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckAbsorbedDecode(const AbsorbedDecodeParams& params);

}  // namespace kernels

#endif  // KERNELS_ABSORBED_DECODE_H_

// CompressKv: one compressor of V4: pools the projections of every `ratio` tokens into one entry of
// the paged cache, channel by channel, and keeps the window that is still open in a state slot.
//
//   z[p]  = gate[p] + position_bias[p mod ratio]           scores, a channel's own
//   r[d]  = sum over a window's tokens of softmax_tokens(z[., d]) * kv[., d]
//   E_e   = rope(rmsnorm(r; norm_weight, norm_eps), e * ratio), rotating the last rope_dim values
//   page[entry e of the sequence] <- format(E_e)           for every window that these rows
//   complete
//
// Without overlap a row has `dim` channels.  With overlap it has 2 dim: entry e pools channels
// dim.. of its own window and channels 0.. of the window before it (entry 0 has none before it).
//
// Rows of a sequence are its newest tokens, positions kv_len - q_len .. kv_len - 1, cut into calls
// anywhere: the state is what the tokens before left.  Position 0 needs no state; the slot's bytes
// are then not read.  A sequence with a slot < 0 is skipped.
//
// State, in float32: pooled sums instead of the tokens themselves, so that a slot costs
// 3 dim (6 dim with overlap) whatever the ratio:
//   [max z | sum of e^(z - max) | sum of e^(z - max) kv]   [3, dim] of the next entry
//   the same of the entry after it, with overlap           (the open window's channels 0..)
// Tokens are added one by one in order, so an entry's bits do not depend on how rows came.
// Source: DeepSeek-V4 paper 2.3; models.md 7.4, 7.5.

#ifndef KERNELS_COMPRESS_KV_H_
#define KERNELS_COMPRESS_KV_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace kernels {

struct CompressKvParams {
  int32_t num_seqs = 0;
  int32_t num_rows = 0;                   // cu_seqlens_q[num_seqs], which only the device may read
  const int32_t* cu_seqlens_q = nullptr;  // [num_seqs + 1]
  const int32_t* kv_len = nullptr;        // [num_seqs], new rows included
  const int32_t* block_table = nullptr;   // [num_seqs, block_table_stride], -1 past the end
  int64_t block_table_stride = 0;         // elements
  int32_t ratio = 0;                      // tokens of a window
  bool overlap = false;
  int32_t dim = 0;              // values of an entry, rotary ones included
  const float* kv = nullptr;    // [total_q, dim or 2 dim]
  int64_t kv_row_stride = 0;    // elements
  const float* gate = nullptr;  // [total_q, dim or 2 dim]
  int64_t gate_row_stride = 0;
  const float* position_bias = nullptr;  // [ratio, dim or 2 dim]
  const float* norm_weight = nullptr;    // [dim]
  float norm_eps = 1e-6f;
  RopeTable rope;  // rope_dim <= dim
  KvPages pages;
  std::byte* state = nullptr;            // this compressor's state in slot 0, aligned to 4
  int64_t state_stride = 0;              // bytes from slot to slot
  const int32_t* state_slots = nullptr;  // [num_seqs]
};

// Bytes of one compressor's state.
constexpr int64_t CompressStateBytes(int32_t dim, bool overlap) {
  return int64_t{overlap ? 6 : 3} * dim * static_cast<int64_t>(sizeof(float));
}

// Values of an entry that its format keeps apart as rotary ones.
int32_t RotaryValues(const CompressKvParams& params);

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckCompressKv(const CompressKvParams& params);

}  // namespace kernels

#endif  // KERNELS_COMPRESS_KV_H_

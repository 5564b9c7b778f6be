#include "kernels/cpu/compress_kv.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/rope.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kChannelsPerTask = 64;

// The new rows of one sequence.
struct Rows {
  int32_t first_row;
  int32_t begin;  // positions
  int32_t end;
};

Rows RowsOf(const CompressKvParams& params, int32_t seq) {
  const int32_t first_row = params.cu_seqlens_q[seq];
  const int32_t num_rows = params.cu_seqlens_q[seq + 1] - first_row;
  return {first_row, params.kv_len[seq] - num_rows, params.kv_len[seq]};
}

// Softmax-weighted sums of some channels, one token at a time.
struct Pool {
  float max[kChannelsPerTask];
  float sum[kChannelsPerTask];
  float weighted[kChannelsPerTask];

  void Reset() {
    std::fill_n(max, kChannelsPerTask, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, kChannelsPerTask, 0.0f);
    std::fill_n(weighted, kChannelsPerTask, 0.0f);
  }
  void Add(int32_t count, const float* kv, const float* gate, const float* bias) {
    for (int32_t c = 0; c < count; ++c) {
      const float score = gate[c] + bias[c];
      if (score > max[c]) {
        const float shrink = std::exp(max[c] - score);
        sum[c] = sum[c] * shrink + 1.0f;
        weighted[c] = weighted[c] * shrink + kv[c];
        max[c] = score;
      } else {
        const float weight = std::exp(score - max[c]);
        sum[c] += weight;
        weighted[c] += weight * kv[c];
      }
    }
  }
  // `state`: [3, dim], from the first of these channels.
  void Load(const float* state, int32_t dim, int32_t count) {
    std::copy_n(state, count, max);
    std::copy_n(state + dim, count, sum);
    std::copy_n(state + 2 * dim, count, weighted);
  }
  void Store(float* state, int32_t dim, int32_t count) const {
    std::copy_n(max, count, state);
    std::copy_n(sum, count, state + dim);
    std::copy_n(weighted, count, state + 2 * dim);
  }
};

// Channels [first, first + count) of one sequence; finished windows go to `pooled`.
void PoolChannels(const CompressKvParams& params, int32_t seq, int32_t first, int32_t count,
                  float* pooled /* [finished, dim] */) {
  const Rows rows = RowsOf(params, seq);
  const int32_t channels = params.overlap ? 2 * params.dim : params.dim;
  const int32_t own = params.overlap ? params.dim + first : first;  // of the entry's own window
  float* state =
      reinterpret_cast<float*>(params.state + params.state_slots[seq] * params.state_stride) +
      first;
  float* next_state = state + 3 * params.dim;
  Pool entry, next;
  entry.Reset();
  next.Reset();
  if (rows.begin > 0) {
    entry.Load(state, params.dim, count);
    if (params.overlap) next.Load(next_state, params.dim, count);
  }
  for (int32_t position = rows.begin; position < rows.end; ++position) {
    const int64_t row = rows.first_row + position - rows.begin;
    const float* kv = params.kv + row * params.kv_row_stride;
    const float* gate = params.gate + row * params.gate_row_stride;
    const int32_t within = position % params.ratio;
    const float* bias = params.position_bias + int64_t{within} * channels;
    entry.Add(count, kv + own, gate + own, bias + own);
    if (params.overlap) next.Add(count, kv + first, gate + first, bias + first);
    if (within + 1 < params.ratio) continue;
    for (int32_t c = 0; c < count; ++c) pooled[first + c] = entry.weighted[c] / entry.sum[c];
    pooled += params.dim;
    entry = next;  // reset already without overlap
    next.Reset();
  }
  entry.Store(state, params.dim, count);
  if (params.overlap) next.Store(next_state, params.dim, count);
}

int64_t SlotOf(const CompressKvParams& params, int32_t seq, int32_t entry) {
  const int32_t block =
      params.block_table[seq * params.block_table_stride + entry / params.pages.block_size];
  return block < 0 ? -1
                   : int64_t{block} * params.pages.block_size + entry % params.pages.block_size;
}

void FinishEntry(const CompressKvParams& params, int32_t seq, int32_t entry, float* values) {
  RmsNormRow(values, params.norm_weight, params.norm_eps, params.dim, values);
  if (params.rope.rope_dim > 0) {
    Rotate(params.rope, entry * params.ratio, values + params.dim - params.rope.rope_dim);
  }
  const int32_t rotary = RotaryValues(params);
  StoreEntry(params.pages, PlaceOfSlot(params.pages, SlotOf(params, seq, entry)), values,
             params.dim - rotary, values + params.dim - rotary, rotary);
}

// That what the rows complete has its place.
absl::Status CheckEntries(const CompressKvParams& params) {
  for (int32_t seq = 0; seq < params.num_seqs; ++seq) {
    if (params.state_slots[seq] < 0) continue;
    const Rows rows = RowsOf(params, seq);
    for (int32_t entry = rows.begin / params.ratio; entry < rows.end / params.ratio; ++entry) {
      if (params.rope.rope_dim > 0) {
        RETURN_IF_ERROR(CheckPosition(params.rope, rows.first_row, entry * params.ratio));
      }
      if (SlotOf(params, seq, entry) < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("compress_kv: entry ", entry, " of sequence ", seq, " has no block"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CompressKv(ThreadPool& pool, const CompressKvParams& params) {
  RETURN_IF_ERROR(CheckCompressKv(params));
  if (params.num_seqs == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckEntries(params));
  // Where each sequence's finished entries begin; then the pooled values of all of them.
  const auto finished = [&](int32_t seq) {
    const Rows rows = RowsOf(params, seq);
    return params.state_slots[seq] < 0 ? 0 : rows.end / params.ratio - rows.begin / params.ratio;
  };
  int64_t num_finished = 0;
  for (int32_t seq = 0; seq < params.num_seqs; ++seq) num_finished += finished(seq);
  const int64_t offset_bytes = (params.num_seqs + 15) / 16 * 64;
  std::byte* scratch =
      pool.Scratch(offset_bytes + num_finished * params.dim * static_cast<int64_t>(sizeof(float)));
  auto* offsets = reinterpret_cast<int32_t*>(scratch);  // [num_seqs]
  auto* pooled = reinterpret_cast<float*>(scratch + offset_bytes);
  for (int32_t seq = 0, at = 0; seq < params.num_seqs; at += finished(seq), ++seq) {
    offsets[seq] = at;
  }

  const int64_t pieces = (params.dim + kChannelsPerTask - 1) / kChannelsPerTask;
  pool.ParallelFor(params.num_seqs * pieces, [&](int64_t task) {
    const auto seq = static_cast<int32_t>(task / pieces);
    if (params.state_slots[seq] < 0) return;
    const auto first = static_cast<int32_t>(task % pieces * kChannelsPerTask);
    PoolChannels(params, seq, first, std::min(kChannelsPerTask, params.dim - first),
                 pooled + int64_t{offsets[seq]} * params.dim);
  });
  pool.ParallelFor(num_finished, [&](int64_t task) {
    // The last sequence that begins at or before the task; those without entries begin with it.
    const auto seq = static_cast<int32_t>(
        std::upper_bound(offsets, offsets + params.num_seqs, static_cast<int32_t>(task)) - offsets -
        1);
    const auto entry =
        RowsOf(params, seq).begin / params.ratio + static_cast<int32_t>(task - offsets[seq]);
    FinishEntry(params, seq, entry, pooled + task * params.dim);
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

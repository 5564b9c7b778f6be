#include "kernels/cpu/ragged_mha.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/thread_scratch.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kRowsPerTask = kMaxTileRows;
constexpr int32_t kKeysPerTile = kMaxTileKeys;
constexpr int32_t kRowPadding = 16;
// Fewer rows than this read a tile too few times for a copy of it to pay.
constexpr int32_t kMinRowsToPack = 12;

absl::Status CheckRunningTotals(const char* name, const int32_t* totals, int32_t num_seqs) {
  for (int32_t seq = 0; seq <= num_seqs; ++seq) {
    if (totals[seq] < 0 || (seq == 0 ? totals[0] != 0 : totals[seq] < totals[seq - 1])) {
      return absl::InvalidArgumentError(
          absl::StrCat("ragged_mha: ", name, "[", seq, "] is ", totals[seq],
                       seq == 0 ? ", not 0" : ", less than the one before"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckArrays(const RaggedMhaParams& params) {
  if (params.kv_dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("ragged_mha: no cpu kernel for keys of dtype ",
                                                   std::string(DTypeName(params.kv_dtype))));
  }
  if (params.rounded_out != nullptr) {
    return absl::InvalidArgumentError("ragged_mha: no cpu kernel that rounds its output");
  }
  absl::Status status = CheckRunningTotals("cu_seqlens_q", params.cu_seqlens_q, params.num_seqs);
  if (status.ok()) {
    status = CheckRunningTotals("cu_seqlens_kv", params.cu_seqlens_kv, params.num_seqs);
  }
  if (!status.ok()) return status;
  if (params.num_rows != params.cu_seqlens_q[params.num_seqs]) {
    return absl::InvalidArgumentError(absl::StrCat("ragged_mha: num_rows is ", params.num_rows,
                                                   ", the sequences have ",
                                                   params.cu_seqlens_q[params.num_seqs]));
  }
  for (int32_t seq = 0; seq < params.num_seqs && params.q_row_begin != nullptr; ++seq) {
    if (params.q_row_begin[seq] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("ragged_mha: q_row_begin[", seq, "] is ", params.q_row_begin[seq]));
    }
  }
  return absl::OkStatus();
}

// Rows [row_begin, row_end) of one sequence and one head.
struct Task {
  int32_t seq = 0;
  int32_t head = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
};

int64_t NumRowTiles(const RaggedMhaParams& params, int32_t seq) {
  const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
  return (int64_t{q_len} + kRowsPerTask - 1) / kRowsPerTask;
}

int64_t NumTasks(const RaggedMhaParams& params) {
  int64_t num_tasks = 0;
  for (int32_t seq = 0; seq < params.num_seqs; ++seq) {
    num_tasks += NumRowTiles(params, seq) * params.num_heads;
  }
  return num_tasks;
}

// The last rows of a sequence, which see most, come first, so that threads end together.
Task FindTask(const RaggedMhaParams& params, int64_t index) {
  int32_t seq = 0;
  int64_t num_tiles = NumRowTiles(params, 0);
  while (index >= num_tiles * params.num_heads) {
    index -= num_tiles * params.num_heads;
    num_tiles = NumRowTiles(params, ++seq);
  }
  const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
  const int32_t tile = static_cast<int32_t>(num_tiles - 1 - index / params.num_heads);
  Task task;
  task.seq = seq;
  task.head = static_cast<int32_t>(index % params.num_heads);
  task.row_begin = tile * kRowsPerTask;
  task.row_end = std::min(task.row_begin + kRowsPerTask, q_len);
  return task;
}

// `base` may be null where a part has no dimensions.
const float* At(const void* base, int64_t row, int64_t row_stride, int64_t head,
                int64_t head_stride) {
  return base == nullptr ? nullptr
                         : static_cast<const float*>(base) + row * row_stride + head * head_stride;
}

// Rows of Q, K and V usually lie a power of two apart, so that a tile of them shares few cache
// sets. `from` [count] rows of `dim` -> `to`, at a stride that does not; pointers follow.
void PackRows(const float** from, int32_t count, int32_t dim, float* to) {
  for (int32_t j = 0; j < count; ++j) {
    float* row = to + int64_t{j} * (dim + kRowPadding);
    std::copy_n(from[j], dim, row);
    from[j] = row;
  }
}

void RunTask(const RaggedMhaParams& params, const Task& task) {
  thread_local ThreadScratch<float> scratch;
  const TileShape shape{params.qk_nope_head_dim, params.qk_rope_head_dim, params.v_head_dim,
                        params.softmax_scale};
  const int32_t head = task.head;
  const int64_t q_begin =
      params.q_row_begin != nullptr ? params.q_row_begin[task.seq] : params.cu_seqlens_q[task.seq];
  const int64_t kv_begin = params.cu_seqlens_kv[task.seq];
  const int64_t kv_len = params.cu_seqlens_kv[task.seq + 1] - kv_begin;
  const int64_t q_len = params.cu_seqlens_q[task.seq + 1] - params.cu_seqlens_q[task.seq];
  const int64_t offset =
      params.causal_offset != nullptr ? params.causal_offset[task.seq] : kv_len - q_len;

  TileRows rows;
  rows.count = task.row_end - task.row_begin;
  const bool pack = rows.count >= kMinRowsToPack;
  const size_t nope_stride = params.qk_nope_head_dim + kRowPadding;
  const size_t rope_stride = params.qk_rope_head_dim + kRowPadding;
  const size_t v_stride = params.v_head_dim + kRowPadding;
  float* acc = scratch.Get(kRowsPerTask * (v_stride + nope_stride + rope_stride) +
                           kKeysPerTile * (v_stride + nope_stride));
  float* packed_q_nope = acc + kRowsPerTask * v_stride;
  float* packed_q_rope = packed_q_nope + kRowsPerTask * nope_stride;
  float* packed_k_nope = packed_q_rope + kRowsPerTask * rope_stride;
  float* packed_v = packed_k_nope + kKeysPerTile * nope_stride;
  for (int32_t i = 0; i < rows.count; ++i) {
    const int64_t row = q_begin + task.row_begin + i;
    rows.q0[i] = At(params.q_nope, row, params.q_nope_row_stride, head, params.q_nope_head_stride);
    rows.q1[i] = At(params.q_rope, row, params.q_rope_row_stride, head, params.q_rope_head_stride);
    rows.acc[i] = acc + i * v_stride;
    rows.Reset(i, params.v_head_dim);
  }

  if (pack) {
    PackRows(rows.q0, rows.count, params.qk_nope_head_dim, packed_q_nope);
    PackRows(rows.q1, rows.count, params.qk_rope_head_dim, packed_q_rope);
  }

  // Keys [0, num_keys) are seen by the last row, the one that sees most.
  const int64_t num_keys = std::clamp<int64_t>(offset + task.row_end, 0, kv_len);
  for (int64_t begin = 0; begin < num_keys; begin += kKeysPerTile) {
    const int32_t tile_keys =
        static_cast<int32_t>(std::min<int64_t>(kKeysPerTile, num_keys - begin));
    TileKeys keys;
    for (int32_t j = 0; j < tile_keys; ++j) {
      const int64_t row = kv_begin + begin + j;
      keys.k0[j] =
          At(params.k_nope, row, params.k_nope_row_stride, head, params.k_nope_head_stride);
      keys.k1[j] = At(params.k_rope, row, params.k_rope_row_stride, 0, 0);
      keys.v[j] = At(params.v, row, params.v_row_stride, head, params.v_head_stride);
    }
    for (int32_t i = 0; i < rows.count; ++i) {
      const int64_t seen = offset + task.row_begin + i + 1 - begin;
      rows.num_visible[i] = static_cast<int32_t>(std::clamp<int64_t>(seen, 0, tile_keys));
    }
    if (pack) {
      PackRows(keys.k0, tile_keys, params.qk_nope_head_dim, packed_k_nope);
      PackRows(keys.v, tile_keys, params.v_head_dim, packed_v);
    }
    AttendTile(shape, keys, rows);
  }

  for (int32_t i = 0; i < rows.count; ++i) {
    const int64_t row = q_begin + task.row_begin + i;
    float* out = params.out + row * params.out_row_stride + head * params.out_head_stride;
    float* lse = params.lse == nullptr ? nullptr : params.lse + head * params.lse_stride + row;
    const float row_lse = FinishRow(shape, rows, i);
    if (params.accumulate) {
      MergeByLse(rows.acc[i], row_lse, params.v_head_dim, out, lse);
    } else {
      std::copy_n(rows.acc[i], params.v_head_dim, out);
      if (lse != nullptr) *lse = row_lse;
    }
  }
}

}  // namespace

absl::Status RaggedMha(ThreadPool& pool, const RaggedMhaParams& params) {
  if (absl::Status status = CheckRaggedMha(params); !status.ok()) return status;
  if (params.num_seqs == 0) return absl::OkStatus();
  if (absl::Status status = CheckArrays(params); !status.ok()) return status;
  pool.ParallelFor(NumTasks(params),
                   [&](int64_t index) { RunTask(params, FindTask(params, index)); });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

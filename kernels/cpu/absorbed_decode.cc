#include "kernels/cpu/absorbed_decode.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/thread_scratch.h"

namespace kernels::cpu {
namespace {

// 32 entries of 576 floats, decoded, fit a second-level cache beside the queries.
constexpr int32_t kKeysPerTile = 32;
constexpr int32_t kMaxVectorsPerTask = kMaxTileRows;
constexpr int32_t kMinVectorsPerTask = 8;
// A wave of more partial results than this, beside one for each row, would not run faster.
constexpr int64_t kMaxExtraPartials = 256;

int32_t QLen(const AbsorbedDecodeParams& params, int32_t seq) {
  return params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
}

// A "partial" is one query row's result over one split, all heads.
int64_t PartialsInWave(int64_t num_rows, int64_t num_partials) {
  return std::min(num_partials, num_rows + kMaxExtraPartials);
}

int64_t MaxPartials(const AbsorbedDecodeParams& params) {
  int64_t num_partials = 0;
  for (int32_t i = 0; i < params.num_splits; ++i) {
    num_partials += QLen(params, params.splits[i].seq);
  }
  return PartialsInWave(params.cu_seqlens_q[params.num_seqs], num_partials);
}

// Splits cover [0, kv_len) of their sequences in order, through blocks that exist.
absl::Status CheckSequences(const AbsorbedDecodeParams& params) {
  int32_t next = 0;  // split
  for (int32_t seq = 0; seq < params.num_seqs; ++seq) {
    if (QLen(params, seq) < 0 || QLen(params, seq) > params.max_q_len ||
        (seq == 0 && params.cu_seqlens_q[0] != 0) || params.kv_len[seq] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("absorbed_decode: sequence ", seq, " has ", QLen(params, seq),
                       " rows (max_q_len ", params.max_q_len, ") and kv_len ", params.kv_len[seq]));
    }
    int32_t covered = 0;
    const int32_t first = next;
    for (; next < params.num_splits && params.splits[next].seq == seq; ++next) {
      const DecodeSplit& split = params.splits[next];
      if (split.kv_begin != covered || split.kv_end < split.kv_begin) {
        return absl::InvalidArgumentError(absl::StrCat(
            "absorbed_decode: split ", next, " of sequence ", seq, " is keys [", split.kv_begin,
            ", ", split.kv_end, "), expected it to begin at ", covered));
      }
      covered = split.kv_end;
    }
    if (next - first > params.max_splits_per_seq) {
      return absl::InvalidArgumentError(absl::StrCat("absorbed_decode: sequence ", seq, " has ",
                                                     next - first, " splits, at most ",
                                                     params.max_splits_per_seq));
    }
    if (QLen(params, seq) == 0) continue;
    if (covered != params.kv_len[seq]) {
      return absl::InvalidArgumentError(absl::StrCat("absorbed_decode: splits of sequence ", seq,
                                                     " cover ", covered, " keys of ",
                                                     params.kv_len[seq]));
    }
    const int64_t num_blocks =
        (int64_t{covered} + params.pages.block_size - 1) / params.pages.block_size;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const bool inside = i < params.block_table_stride;
      const int32_t block = inside ? params.block_table[seq * params.block_table_stride + i] : -1;
      if (block >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("absorbed_decode: sequence ", seq,
                                                     " with kv_len ", covered,
                                                     " has no block at index ", i));
    }
  }
  if (params.num_rows != params.cu_seqlens_q[params.num_seqs]) {
    return absl::InvalidArgumentError(absl::StrCat("absorbed_decode: num_rows is ", params.num_rows,
                                                   ", the sequences have ",
                                                   params.cu_seqlens_q[params.num_seqs]));
  }
  if (next != params.num_splits) {
    return absl::InvalidArgumentError(
        absl::StrCat("absorbed_decode: split ", next, " is of sequence ", params.splits[next].seq,
                     " among ", params.num_seqs, ", or out of order"));
  }
  return absl::OkStatus();
}

// Results of the rows while splits are folded in, and partial results of the wave at work.
struct Workspace {
  float* lse;          // [num_rows, num_heads]
  float* partial_lse;  // [max_partials, num_heads]
  float* partial_out;  // [max_partials, num_heads, kv_lora_rank]
  float* out;          // [num_rows, num_heads, kv_lora_rank], or params.out without w_uv
  int64_t out_row_stride;
  int64_t out_head_stride;
};

Workspace LayOut(const AbsorbedDecodeParams& params, int64_t num_rows, int64_t partials) {
  const int64_t heads = params.num_heads;
  Workspace work;
  work.lse = reinterpret_cast<float*>(params.workspace);
  work.partial_lse = work.lse + num_rows * heads;
  work.partial_out = work.partial_lse + partials * heads;
  if (params.w_uv != nullptr) {
    work.out = work.partial_out + partials * heads * params.kv_lora_rank;
    work.out_row_stride = heads * params.kv_lora_rank;
    work.out_head_stride = params.kv_lora_rank;
  } else {
    work.out = params.out;
    work.out_row_stride = params.out_row_stride;
    work.out_head_stride = params.out_head_stride;
  }
  return work;
}

// Query vectors [begin, end) of a split; vector i is row i / num_heads and head i % num_heads.
struct Task {
  int32_t split = 0;
  int64_t partial = 0;  // of the split's first row
  int64_t begin = 0;
  int64_t end = 0;
};

// Splits [begin, end) computed together.
struct Wave {
  int32_t begin = 0;
  int32_t end = 0;
  int64_t num_vectors = 0;
};

Wave NextWave(const AbsorbedDecodeParams& params, int32_t begin, int64_t max_partials) {
  Wave wave{begin, begin, 0};
  int64_t num_partials = 0;
  for (; wave.end < params.num_splits; ++wave.end) {
    num_partials += QLen(params, params.splits[wave.end].seq);
    if (num_partials > max_partials) break;
    wave.num_vectors = num_partials * params.num_heads;
  }
  return wave;
}

// Enough tasks to keep the threads busy; beyond that, a page is best read by few of them.
int64_t VectorsPerTask(int64_t num_vectors, int32_t num_threads) {
  const int64_t share = num_vectors / (2 * int64_t{num_threads});
  return std::clamp<int64_t>(share / 4 * 4, kMinVectorsPerTask, kMaxVectorsPerTask);
}

int64_t NumTasks(const AbsorbedDecodeParams& params, int32_t split, int64_t vectors_per_task) {
  const int64_t num_vectors = int64_t{QLen(params, params.splits[split].seq)} * params.num_heads;
  return (num_vectors + vectors_per_task - 1) / vectors_per_task;
}

Task FindTask(const AbsorbedDecodeParams& params, const Wave& wave, int64_t vectors_per_task,
              int64_t index) {
  Task task;
  task.split = wave.begin;
  for (;; ++task.split) {
    const int64_t num_tasks = NumTasks(params, task.split, vectors_per_task);
    if (index < num_tasks) break;
    index -= num_tasks;
    task.partial += QLen(params, params.splits[task.split].seq);
  }
  const int64_t num_vectors =
      int64_t{QLen(params, params.splits[task.split].seq)} * params.num_heads;
  task.begin = index * vectors_per_task;
  task.end = std::min(task.begin + vectors_per_task, num_vectors);
  return task;
}

// Points `keys` at keys [begin, begin + count) of a sequence: into the pages where they are
// float32, else at `decoded` [count, rank + rope].
void LoadKeys(const AbsorbedDecodeParams& params, int32_t seq, int32_t begin, int32_t count,
              float* decoded, TileKeys& keys) {
  const int32_t* blocks = params.block_table + seq * params.block_table_stride;
  const KvPages& pages = params.pages;
  const int32_t rank = params.kv_lora_rank;
  for (int32_t j = 0; j < count; ++j) {
    const int32_t key = begin + j;
    const int64_t block = blocks[key / pages.block_size];
    const EntryPlace place{pages.base + block * pages.block_stride, key % pages.block_size};
    if (pages.format == KvFormat::kFloat32) {
      keys.k0[j] = reinterpret_cast<const float*>(EntryAt(pages, place));
    } else {
      float* latent = decoded + int64_t{j} * (rank + params.qk_rope_head_dim);
      LoadEntry(pages, place, rank, params.qk_rope_head_dim, latent, latent + rank);
      keys.k0[j] = latent;
    }
    keys.k1[j] = keys.k0[j] + rank;
    keys.v[j] = keys.k0[j];
  }
}

void RunTask(const AbsorbedDecodeParams& params, const Workspace& work, const Task& task) {
  thread_local ThreadScratch<float> scratch;
  const int32_t rank = params.kv_lora_rank;
  const int32_t rope = params.qk_rope_head_dim;
  const int32_t heads = params.num_heads;
  const TileShape shape{rank, rope, rank, params.softmax_scale};
  const DecodeSplit& split = params.splits[task.split];
  const int32_t q_len = QLen(params, split.seq);
  // Row r of the sequence sees keys [0, unseen_end + r).
  const int64_t unseen_end = int64_t{params.kv_len[split.seq]} - q_len + 1;

  TileRows rows;
  rows.count = static_cast<int32_t>(task.end - task.begin);
  int64_t num_seen[kMaxTileRows];
  for (int32_t i = 0; i < rows.count; ++i) {
    const int64_t row = (task.begin + i) / heads;
    const int64_t head = (task.begin + i) % heads;
    const int64_t q_row = params.cu_seqlens_q[split.seq] + row;
    rows.q0[i] =
        params.q_latent + q_row * params.q_latent_row_stride + head * params.q_latent_head_stride;
    rows.q1[i] = params.q_rope == nullptr ? nullptr
                                          : params.q_rope + q_row * params.q_rope_row_stride +
                                                head * params.q_rope_head_stride;
    rows.acc[i] = work.partial_out + ((task.partial + row) * heads + head) * rank;
    rows.Reset(i, rank);
    num_seen[i] = unseen_end + row;
  }

  float* decoded = params.pages.format == KvFormat::kFloat32
                       ? nullptr
                       : scratch.Get(static_cast<size_t>(kKeysPerTile) * (rank + rope));
  const int32_t end =
      static_cast<int32_t>(std::min<int64_t>(split.kv_end, num_seen[rows.count - 1]));
  TileKeys keys;
  for (int32_t begin = split.kv_begin; begin < end; begin += kKeysPerTile) {
    const int32_t tile_keys = std::min(kKeysPerTile, end - begin);
    LoadKeys(params, split.seq, begin, tile_keys, decoded, keys);
    for (int32_t i = 0; i < rows.count; ++i) {
      rows.num_visible[i] =
          static_cast<int32_t>(std::clamp<int64_t>(num_seen[i] - begin, 0, tile_keys));
    }
    AttendTile(shape, keys, rows);
  }
  for (int32_t i = 0; i < rows.count; ++i) {
    const int64_t vector = task.partial * heads + task.begin + i;
    work.partial_lse[vector] = FinishRow(shape, rows, i);
  }
}

// Folds a wave's partial results of one row into its result.
void FoldRow(const AbsorbedDecodeParams& params, const Workspace& work, const Wave& wave,
             int32_t row) {
  const int64_t heads = params.num_heads;
  int64_t partial = 0;
  for (int32_t i = wave.begin; i < wave.end; ++i) {
    const int32_t seq = params.splits[i].seq;
    const int32_t in_seq = row - params.cu_seqlens_q[seq];
    if (in_seq >= 0 && in_seq < QLen(params, seq)) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t vector = (partial + in_seq) * heads + head;
        MergeByLse(work.partial_out + vector * params.kv_lora_rank, work.partial_lse[vector],
                   params.kv_lora_rank,
                   work.out + row * work.out_row_stride + head * work.out_head_stride,
                   work.lse + row * heads + head);
      }
    }
    partial += QLen(params, seq);
  }
}

}  // namespace

int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                     int32_t num_heads, int32_t kv_lora_rank) {
  const int64_t vectors =
      (max_rows + PartialsInWave(max_rows, int64_t{max_rows} * max_splits_per_seq)) * num_heads;
  return vectors * (int64_t{kv_lora_rank} + 1) * static_cast<int64_t>(sizeof(float));
}

absl::Status AbsorbedDecode(ThreadPool& pool, const AbsorbedDecodeParams& params) {
  if (absl::Status status = CheckAbsorbedDecode(params); !status.ok()) return status;
  if (params.num_seqs == 0) return absl::OkStatus();
  if (params.rounded_out != nullptr) {
    return absl::InvalidArgumentError("absorbed_decode: no cpu kernel that rounds its output");
  }
  if (absl::Status status = CheckSequences(params); !status.ok()) return status;
  const int32_t num_rows = params.cu_seqlens_q[params.num_seqs];
  const int64_t heads = params.num_heads;
  const int64_t max_partials = MaxPartials(params);
  const Workspace work = LayOut(params, num_rows, max_partials);

  std::fill_n(work.lse, num_rows * heads, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < num_rows * heads; ++i) {
    std::fill_n(work.out + i / heads * work.out_row_stride + i % heads * work.out_head_stride,
                params.kv_lora_rank, 0.0f);
  }

  for (int32_t begin = 0; begin < params.num_splits;) {
    const Wave wave = NextWave(params, begin, max_partials);
    const int64_t vectors_per_task = VectorsPerTask(wave.num_vectors, pool.num_threads());
    int64_t num_tasks = 0;
    for (int32_t i = wave.begin; i < wave.end; ++i) {
      num_tasks += NumTasks(params, i, vectors_per_task);
    }
    pool.ParallelFor(num_tasks, [&](int64_t index) {
      RunTask(params, work, FindTask(params, wave, vectors_per_task, index));
    });
    pool.ParallelFor(num_rows,
                     [&](int64_t row) { FoldRow(params, work, wave, static_cast<int32_t>(row)); });
    begin = wave.end;
  }

  for (int64_t i = 0; params.lse != nullptr && i < num_rows * heads; ++i) {
    params.lse[i % heads * params.lse_stride + i / heads] = work.lse[i];
  }
  if (params.w_uv == nullptr || num_rows == 0) return absl::OkStatus();
  HeadLinearParams linear;
  linear.weight = params.w_uv;
  linear.num_rows = num_rows;
  linear.input = work.out;
  linear.input_row_stride = work.out_row_stride;
  linear.input_head_stride = work.out_head_stride;
  linear.output = params.out;
  linear.output_row_stride = params.out_row_stride;
  linear.output_head_stride = params.out_head_stride;
  return HeadLinear(pool, linear);
}

}  // namespace kernels::cpu

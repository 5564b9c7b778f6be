#include "kernels/cpu/sparse_decode.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/thread_scratch.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

// 32 entries of 576 floats, decoded, fit a second-level cache beside the queries.
constexpr int32_t kKeysPerTile = 32;
constexpr int32_t kMinHeadsPerTask = 8;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The inverse rotation's positions.
absl::Status CheckPositions(const SparseDecodeParams& params) {
  if (params.inverse_rope.rope_dim == 0) return absl::OkStatus();
  for (int32_t row = 0; row < params.num_rows; ++row) {
    if (params.positions[row] < 0) continue;  // a padded row
    RETURN_IF_ERROR(CheckPosition(params.inverse_rope, row, params.positions[row]));
  }
  return absl::OkStatus();
}

// Where a row's result goes before W_UV.
struct Values {
  float* data;
  int64_t row_stride;  // elements
  int64_t head_stride;
};

// Entries on their way into a tile.
class KeyTile {
 public:
  KeyTile(const SparseDecodeParams& params, const TileShape& shape, float* decoded, TileRows& rows)
      : shape_(shape),
        entry_dim_(params.dim + params.rope_dim),
        dim_(params.dim),
        decoded_(decoded),
        rows_(rows) {}

  void Add(const KvPages& pages, int64_t slot) {
    const EntryPlace place = PlaceOfSlot(pages, slot);
    if (pages.format == KvFormat::kFloat32) {
      keys_.k0[count_] = reinterpret_cast<const float*>(EntryAt(pages, place));
    } else {
      float* values = decoded_ + int64_t{count_} * entry_dim_;
      LoadEntry(pages, place, dim_, entry_dim_ - dim_, values, values + dim_);
      keys_.k0[count_] = values;
    }
    keys_.k1[count_] = keys_.k0[count_] + dim_;
    keys_.v[count_] = keys_.k0[count_];
    if (++count_ == kKeysPerTile) Attend();
  }

  void Attend() {
    if (count_ == 0) return;
    std::fill_n(rows_.num_visible, rows_.count, count_);
    AttendTile(shape_, keys_, rows_);
    count_ = 0;
  }

 private:
  const TileShape& shape_;
  const int32_t entry_dim_;
  const int32_t dim_;
  float* const decoded_;  // [kKeysPerTile, entry_dim]
  TileRows& rows_;
  TileKeys keys_;
  int32_t count_ = 0;
};

void AddSource(const SparseSource& source, int32_t row, KeyTile& tile) {
  if (source.indices == nullptr) return;
  const int32_t length =
      source.lengths == nullptr ? source.width : std::clamp(source.lengths[row], 0, source.width);
  const int32_t* indices = source.indices + row * source.index_stride;
  for (int32_t i = 0; i < length; ++i) {
    const int64_t slot = indices[i];
    if (slot >= 0 && slot < source.num_slots) tile.Add(source.pages, slot);
  }
}

// What a sink with this logit leaves of the values.
float SinkFactor(float sink, float lse) {
  return lse == -kInfinity ? 1.0f : 1.0f / (1.0f + std::exp(sink - lse));
}

// Heads [begin, end) of one row.
void RunTask(const SparseDecodeParams& params, const Values& out, int32_t row, int32_t begin,
             int32_t end) {
  thread_local ThreadScratch<float> scratch;
  const TileShape shape{params.dim, params.rope_dim, params.value_dim, params.softmax_scale};
  TileRows rows;
  rows.count = end - begin;
  for (int32_t i = 0; i < rows.count; ++i) {
    const int64_t head = begin + i;
    rows.q0[i] = params.q + row * params.q_row_stride + head * params.q_head_stride;
    rows.q1[i] = params.q_rope == nullptr ? nullptr
                                          : params.q_rope + row * params.q_rope_row_stride +
                                                head * params.q_rope_head_stride;
    rows.acc[i] = out.data + row * out.row_stride + head * out.head_stride;
    rows.Reset(i, params.value_dim);
  }
  KeyTile tile(params, shape,
               scratch.Get(static_cast<size_t>(kKeysPerTile) * (params.dim + params.rope_dim)),
               rows);
  for (const SparseSource& source : params.sources) AddSource(source, row, tile);
  tile.Attend();

  const RopeTable& rope = params.inverse_rope;
  for (int32_t i = 0; i < rows.count; ++i) {
    const int32_t head = begin + i;
    const float lse = FinishRow(shape, rows, i);
    if (params.lse != nullptr) params.lse[head * params.lse_stride + row] = lse;
    if (params.sink != nullptr) {
      const float factor = SinkFactor(params.sink[head], lse);
      for (int32_t d = 0; d < params.value_dim; ++d) rows.acc[i][d] *= factor;
    }
    if (rope.rope_dim > 0 && params.positions[row] >= 0) {
      RotateBack(rope, params.positions[row], rows.acc[i] + params.value_dim - rope.rope_dim);
    }
  }
}

// Enough tasks to keep the threads busy; beyond that, an entry is best read by few of them.  Where
// heads are cut changes no result.
int32_t HeadsPerTask(const SparseDecodeParams& params, int32_t num_threads) {
  const int64_t share = int64_t{params.num_rows} * params.num_heads / (2 * int64_t{num_threads});
  return static_cast<int32_t>(
      std::clamp<int64_t>(share / 4 * 4, kMinHeadsPerTask, int64_t{kMaxTileRows}));
}

}  // namespace

int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t num_heads, int32_t value_dim) {
  return int64_t{max_rows} * num_heads * value_dim * static_cast<int64_t>(sizeof(float));
}

absl::Status SparseDecode(ThreadPool& pool, const SparseDecodeParams& params) {
  RETURN_IF_ERROR(CheckSparseDecode(params));
  if (params.num_rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPositions(params));
  Values values{params.out, params.out_row_stride, params.out_head_stride};
  if (params.w_uv != nullptr) {
    values = {reinterpret_cast<float*>(params.workspace),
              int64_t{params.num_heads} * params.value_dim, params.value_dim};
  }
  const int32_t heads_per_task = HeadsPerTask(params, pool.num_threads());
  const int32_t tasks_per_row = (params.num_heads + heads_per_task - 1) / heads_per_task;
  pool.ParallelFor(int64_t{params.num_rows} * tasks_per_row, [&](int64_t task) {
    const int32_t begin = static_cast<int32_t>(task % tasks_per_row) * heads_per_task;
    RunTask(params, values, static_cast<int32_t>(task / tasks_per_row), begin,
            std::min(begin + heads_per_task, params.num_heads));
  });
  if (params.w_uv == nullptr) return absl::OkStatus();
  HeadLinearParams linear;
  linear.weight = params.w_uv;
  linear.num_rows = params.num_rows;
  linear.input = values.data;
  linear.input_row_stride = values.row_stride;
  linear.input_head_stride = values.head_stride;
  linear.output = params.out;
  linear.output_row_stride = params.out_row_stride;
  linear.output_head_stride = params.out_head_stride;
  return HeadLinear(pool, linear);
}

}  // namespace kernels::cpu

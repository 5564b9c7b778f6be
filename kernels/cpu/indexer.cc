#include "kernels/cpu/indexer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention_tile_primitives.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/thread_scratch.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kKeysPerTask = 1024;

// That what the rows see is there.
absl::Status CheckVisible(const IndexerRows& rows, int32_t block_entries, int64_t logits_stride) {
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    const int32_t visible = rows.Visible(row);
    if (visible == 0) continue;
    if (visible > rows.top_k && visible > logits_stride) {
      return absl::InvalidArgumentError(absl::StrCat("indexer: row ", row, " sees ", visible,
                                                     " keys, its logits have room for ",
                                                     logits_stride));
    }
    const int32_t* blocks = rows.block_table + rows.row_to_seq[row] * rows.block_table_stride;
    const int64_t num_blocks = (int64_t{visible} + block_entries - 1) / block_entries;
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (i < rows.block_table_stride && blocks[i] >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("indexer: row ", row, " of sequence ",
                                                     rows.row_to_seq[row], " sees ", visible,
                                                     " keys and has no block at index ", i));
    }
  }
  return absl::OkStatus();
}

// Logits of keys [begin, begin + count) of one row, count <= kMaxTileKeys.
void ScoreTile(const IndexerLogitsParams& params, int32_t row, int32_t begin, int32_t count,
               float* decoded, TileRows& heads, TileKeys& keys) {
  const IndexerRows& rows = params.rows;
  const int32_t* blocks = rows.block_table + rows.row_to_seq[row] * rows.block_table_stride;
  const KvPages& pages = params.pages;
  for (int32_t j = 0; j < count; ++j) {
    const int32_t key = begin + j;
    const EntryPlace place{pages.base + blocks[key / pages.block_size] * pages.block_stride,
                           key % pages.block_size};
    if (pages.format == KvFormat::kFloat32) {
      keys.k0[j] = reinterpret_cast<const float*>(EntryAt(pages, place));
    } else {
      float* values = decoded + int64_t{j} * params.head_dim;
      LoadEntry(pages, place, params.head_dim, 0, values, nullptr);
      keys.k0[j] = values;
    }
    keys.k1[j] = keys.k0[j];  // of no elements
  }
  const TileShape shape{.dim0 = params.head_dim};
  const float* q = params.q + row * params.q_row_stride;
  const float* weights = params.weights + row * params.weights_row_stride;
  alignas(64) float sums[kMaxTileKeys] = {};
  alignas(64) float scores[kMaxTileRows * kMaxTileKeys];
  for (int32_t head = 0; head < params.num_heads; head += kMaxTileRows) {
    heads.count = std::min(kMaxTileRows, params.num_heads - head);
    for (int32_t i = 0; i < heads.count; ++i) {
      heads.q0[i] = q + (head + i) * params.q_head_stride;
      heads.q1[i] = heads.q0[i];
    }
    BestTilePrimitives().scores(shape, heads, /*first_row=*/0, keys, count, scores);
    for (int32_t i = 0; i < heads.count; ++i) {
      const float weight = weights[head + i];
      const float* score = scores + i * kMaxTileKeys;
      for (int32_t j = 0; j < count; ++j) sums[j] += weight * std::max(score[j], 0.0f);
    }
  }
  float* logits = params.logits + row * params.logits_stride + begin;
  for (int32_t j = 0; j < count; ++j) logits[j] = sums[j] * params.scale;
}

// Maps floats to integers in the same order; -0 to where +0 is, NaN below everything.
uint32_t OrderOf(float value) {
  if (std::isnan(value)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// Positions of the top_k largest of `visible` > top_k logits, ascending.
template <typename Emit>
void SelectLargest(const float* logits, int32_t visible, int32_t top_k, const Emit& emit) {
  thread_local ThreadScratch<uint32_t> scratch;
  uint32_t* order = scratch.Get(2 * static_cast<size_t>(visible));
  uint32_t* ranked = order + visible;
  for (int32_t j = 0; j < visible; ++j) order[j] = OrderOf(logits[j]);
  std::copy_n(order, visible, ranked);
  std::nth_element(ranked, ranked + top_k - 1, ranked + visible, std::greater<>());
  const uint32_t least = ranked[top_k - 1];
  // Of those that tie with the least, as many as leave room for the larger ones.
  int32_t ties = top_k;
  for (int32_t j = 0; j < visible; ++j) ties -= order[j] > least ? 1 : 0;
  for (int32_t j = 0; j < visible; ++j) {
    if (order[j] > least || (order[j] == least && ties-- > 0)) emit(j);
  }
}

void SelectRow(const TopKSlotsParams& params, int32_t row) {
  const IndexerRows& rows = params.rows;
  const int32_t visible = rows.Visible(row);
  const int32_t* blocks = rows.block_table + rows.row_to_seq[row] * rows.block_table_stride;
  int32_t* slots = params.slots + row * params.slots_stride;
  int32_t count = 0;
  const auto emit = [&](int32_t key) {
    slots[count++] =
        blocks[key / params.block_entries] * params.block_entries + key % params.block_entries;
  };
  if (visible <= rows.top_k) {
    for (int32_t key = 0; key < visible; ++key) emit(key);
  } else {
    SelectLargest(params.logits + row * params.logits_stride, visible, rows.top_k, emit);
  }
  std::fill(slots + count, slots + params.slots_width, -1);
  if (params.lengths != nullptr) params.lengths[row] = count;
}

}  // namespace

absl::Status IndexerLogits(ThreadPool& pool, const IndexerLogitsParams& params) {
  const IndexerRows& rows = params.rows;
  RETURN_IF_ERROR(CheckIndexerLogits(params));
  RETURN_IF_ERROR(CheckVisible(rows, params.pages.block_size, params.logits_stride));
  int32_t most_visible = 0;
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    most_visible = std::max(most_visible, rows.Visible(row));
  }
  if (most_visible <= rows.top_k) return absl::OkStatus();
  const int64_t tasks_per_row = (int64_t{most_visible} + kKeysPerTask - 1) / kKeysPerTask;
  pool.ParallelFor(rows.num_rows * tasks_per_row, [&](int64_t task) {
    thread_local ThreadScratch<float> scratch;
    const auto row = static_cast<int32_t>(task / tasks_per_row);
    const int32_t visible = rows.Visible(row);
    if (visible <= rows.top_k) return;
    float* decoded = params.pages.format == KvFormat::kFloat32
                         ? nullptr
                         : scratch.Get(static_cast<size_t>(kMaxTileKeys) * params.head_dim);
    TileRows heads;
    TileKeys keys;
    const int32_t task_begin = static_cast<int32_t>(task % tasks_per_row) * kKeysPerTask;
    const int32_t task_end = std::min(task_begin + kKeysPerTask, visible);
    for (int32_t begin = task_begin; begin < task_end; begin += kMaxTileKeys) {
      ScoreTile(params, row, begin, std::min(kMaxTileKeys, task_end - begin), decoded, heads, keys);
    }
  });
  return absl::OkStatus();
}

absl::Status TopKSlots(ThreadPool& pool, const TopKSlotsParams& params) {
  const IndexerRows& rows = params.rows;
  RETURN_IF_ERROR(CheckTopKSlots(params));
  RETURN_IF_ERROR(CheckVisible(rows, params.block_entries, params.logits_stride));
  pool.ParallelFor(rows.num_rows,
                   [&](int64_t row) { SelectRow(params, static_cast<int32_t>(row)); });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

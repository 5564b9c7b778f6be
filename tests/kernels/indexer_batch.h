// A batch of the indexer: rows of several sequences and their paged keys, and the reference in
// double.

#ifndef TESTS_KERNELS_INDEXER_BATCH_H_
#define TESTS_KERNELS_INDEXER_BATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cpu/kv_entry.h"
#include "kernels/indexer.h"
#include "kernels/store_kv.h"
#include "tests/kernels/random_tensor.h"

namespace kernels {

// Rows of several sequences over paged keys; whatever is nobody's is NaN.
struct IndexerBatch {
  // `gap`: elements between heads and rows of q.
  struct Row {
    int32_t seq, position;
  };

  IndexerBatch(KvFormat format, int32_t num_heads, int32_t head_dim, std::vector<int32_t> num_keys,
               const std::vector<Row>& rows, int32_t top_k, int32_t tokens_per_key = 1,
               int32_t gap = 1)
      : num_heads(num_heads), head_dim(head_dim), num_keys(std::move(num_keys)) {
    pages.format = format;
    pages.block_size = 8;
    pages.entry_bytes = KvEntryBytes(format, head_dim, 0);
    pages.block_stride = (int64_t{pages.entry_bytes} * pages.block_size + 63) / 64 * 64;
    const int32_t most = *std::max_element(this->num_keys.begin(), this->num_keys.end());
    stride = most / pages.block_size + 2;
    std::vector<int32_t> blocks(stride * this->num_keys.size() + 1);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(3));
    memory.assign(blocks.size() * pages.block_stride, std::byte{0xff});
    pages.base = memory.data();
    table.assign(stride * this->num_keys.size(), -1);
    for (size_t s = 0; s < this->num_keys.size(); ++s) {
      keys.push_back(RandomTensor(this->num_keys[s] * head_dim, 20 + static_cast<uint32_t>(s)));
      for (int32_t j = 0; j < this->num_keys[s]; ++j) {
        int32_t& block = table[s * stride + j / pages.block_size];
        if (block < 0) {
          block = blocks.back();
          blocks.pop_back();
        }
        float* key = &keys[s][int64_t{j} * head_dim];
        const cpu::EntryPlace place = cpu::PlaceOfSlot(pages, Slot(static_cast<int32_t>(s), j));
        cpu::StoreEntry(pages, place, key, head_dim, nullptr, 0);
        cpu::LoadEntry(pages, place, head_dim, 0, key, nullptr);
      }
    }
    for (const Row& row : rows) {
      positions.push_back(row.position);
      row_to_seq.push_back(row.seq);
    }
    num_rows = static_cast<int32_t>(rows.size());
    q_head_stride = head_dim + gap;
    q_row_stride = num_heads * q_head_stride + 3 * gap;
    q = RandomTensor(num_rows * q_row_stride, 1);
    weights = RandomTensor(num_rows * (num_heads + 2), 2);
    logits_stride = most + 5;
    logits.assign(num_rows * logits_stride, std::numeric_limits<float>::quiet_NaN());
    index = {.num_rows = num_rows,
             .positions = positions.data(),
             .tokens_per_key = tokens_per_key,
             .row_to_seq = row_to_seq.data(),
             .block_table = table.data(),
             .block_table_stride = stride,
             .top_k = top_k};
  }
  IndexerBatch(const IndexerBatch&) = delete;
  IndexerBatch& operator=(const IndexerBatch&) = delete;

  int32_t Slot(int32_t seq, int32_t key) const {
    return table[seq * stride + key / pages.block_size] * pages.block_size + key % pages.block_size;
  }

  IndexerLogitsParams Logits() {
    return {.rows = index,
            .num_heads = num_heads,
            .head_dim = head_dim,
            .scale = 0.3f,
            .q = q.data(),
            .q_row_stride = q_row_stride,
            .q_head_stride = q_head_stride,
            .weights = weights.data(),
            .weights_row_stride = num_heads + 2,
            .pages = pages,
            .logits = logits.data(),
            .logits_stride = logits_stride};
  }

  std::vector<double> ReferenceLogits(int32_t row) const {
    std::vector<double> result;
    for (int32_t j = 0; j < index.Visible(row); ++j) {
      double sum = 0;
      for (int32_t h = 0; h < num_heads; ++h) {
        double dot = 0;
        for (int32_t d = 0; d < head_dim; ++d) {
          dot += static_cast<double>(q[row * q_row_stride + h * q_head_stride + d]) *
                 keys[row_to_seq[row]][int64_t{j} * head_dim + d];
        }
        sum += weights[row * (num_heads + 2) + h] * std::max(dot, 0.0);
      }
      result.push_back(0.3f * sum);
    }
    return result;
  }

  int32_t num_heads, head_dim, num_rows = 0;
  std::vector<int32_t> num_keys;
  KvPages pages;
  int64_t stride = 0, q_row_stride = 0, q_head_stride = 0, logits_stride = 0;
  std::vector<std::byte> memory;
  std::vector<int32_t> table, positions, row_to_seq;
  std::vector<std::vector<float>> keys;  // of each sequence, as stored
  std::vector<float> q, weights, logits;
  IndexerRows index;
};

// What is kept of `visible` logits: positions, ascending, by a full sort.
inline std::vector<int32_t> KeptPositions(const float* logits, int32_t visible, int32_t top_k) {
  std::vector<int32_t> order(visible);
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t j) {
    return std::isnan(logits[j]) ? -std::numeric_limits<float>::infinity() : logits[j];
  };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(logits[a]) != std::isnan(logits[b])) return !std::isnan(logits[a]);
    return value(a) > value(b);
  });
  order.resize(std::min(visible, top_k));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace kernels

#endif  // TESTS_KERNELS_INDEXER_BATCH_H_

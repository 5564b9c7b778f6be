// Cases of SparseDecode: rows with lists of entries in up to two sources, and the reference in
// double.

#ifndef TESTS_KERNELS_SPARSE_CASE_H_
#define TESTS_KERNELS_SPARSE_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/sparse_decode.h"
#include "kernels/store_kv.h"
#include "tests/kernels/random_tensor.h"

namespace kernels::sparse {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

struct Dims {
  int32_t heads, dim, rope, value;
};

// Paged entries of one source.  Slots that no index names are NaN.
struct Source {
  Source(const Dims& dims, KvFormat format, int32_t block_size, int32_t num_blocks,
         std::vector<std::vector<int32_t>> lists, uint32_t seed)
      : dims(dims), lists(std::move(lists)) {
    pages.format = format;
    pages.block_size = block_size;
    pages.entry_bytes = KvEntryBytes(format, dims.dim, dims.rope);
    pages.block_stride = (int64_t{pages.entry_bytes} * block_size + 63) / 64 * 64;
    num_slots = block_size * num_blocks;
    memory.assign(pages.block_stride * num_blocks, std::byte{0xff});
    const int32_t entry = dims.dim + dims.rope;
    values = RandomTensor(num_slots * entry, seed);
    for (const std::vector<int32_t>& list : this->lists) {
      for (const int32_t slot : list) Store(slot);
    }
    size_t longest = 1;
    for (const std::vector<int32_t>& list : this->lists) longest = std::max(longest, list.size());
    Lay(static_cast<int32_t>((longest + 127) / 128 * 128), /*holes=*/{});
  }

  void Store(int32_t slot) {
    if (slot < 0 || slot >= num_slots) return;
    pages.base = memory.data();
    const int32_t entry = dims.dim + dims.rope;
    float* at = &values[int64_t{slot} * entry];
    cpu::StoreEntry(pages, cpu::PlaceOfSlot(pages, slot), at, dims.dim, at + dims.dim, dims.rope);
    cpu::LoadEntry(pages, cpu::PlaceOfSlot(pages, slot), dims.dim, dims.rope, at, at + dims.dim);
  }

  // Rows of `width` indices; each of `holes` stands once among the real ones.
  void Lay(int32_t width, const std::vector<int32_t>& holes) {
    this->width = width;
    stride = width + 3;
    indices.assign(lists.size() * stride, kMax);
    lengths.clear();
    for (size_t row = 0; row < lists.size(); ++row) {
      std::vector<int32_t> list = lists[row];
      for (size_t i = 0; i < holes.size(); ++i) {
        list.insert(list.begin() + static_cast<int64_t>(i * 7 % (list.size() + 1)), holes[i]);
      }
      lengths.push_back(static_cast<int32_t>(list.size()));
      ASSERT_LE(lengths.back(), width);
      std::copy(list.begin(), list.end(), indices.begin() + row * stride);
      std::fill(indices.begin() + row * stride + list.size(),
                indices.begin() + row * stride + width, -1);
    }
  }

  SparseSource View() {
    pages.base = memory.data();
    return {.pages = pages,
            .indices = indices.data(),
            .index_stride = stride,
            .width = width,
            .lengths = lengths.data(),
            .num_slots = num_slots};
  }

  Dims dims;
  std::vector<std::vector<int32_t>> lists;  // slots of each row
  KvPages pages;
  int32_t num_slots = 0, width = 0;
  int64_t stride = 0;
  std::vector<std::byte> memory;
  std::vector<float> values;  // [num_slots, dim + rope], as stored
  std::vector<int32_t> indices, lengths;
};

struct Case {
  // `gap`: elements between what is laid out in rows.
  Case(const Dims& dims, int32_t num_rows, int32_t gap = 1) : dims(dims), num_rows(num_rows) {
    q_head_stride = dims.dim + dims.rope + gap;
    q_row_stride = dims.heads * q_head_stride + 2 * gap;
    out_head_stride = dims.value + 3 * gap;
    out_row_stride = dims.heads * out_head_stride + gap;
    lse_stride = num_rows + 4;
    q = RandomTensor(num_rows * q_row_stride, 5);
    out.assign(num_rows * out_row_stride, kNan);
    lse.assign(dims.heads * lse_stride, kNan);
    const int32_t half = dims.rope / 2;
    for (const float angle : RandomTensor(kPositions * half, 6)) {
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
    for (int32_t row = 0; row < num_rows; ++row) positions.push_back(row * 5 % kPositions);
  }

  SparseDecodeParams Params() {
    SparseDecodeParams p;
    p.num_rows = num_rows;
    p.num_heads = dims.heads;
    p.dim = dims.dim;
    p.rope_dim = dims.rope;
    p.value_dim = dims.value;
    p.softmax_scale = 0.1f;
    for (size_t i = 0; i < sources.size(); ++i) p.sources[i] = sources[i].View();
    p.q = q.data();
    p.q_rope = q.data() + dims.dim;
    p.q_row_stride = p.q_rope_row_stride = q_row_stride;
    p.q_head_stride = p.q_rope_head_stride = q_head_stride;
    p.sink = sink.empty() ? nullptr : sink.data();
    if (inverse_rope) {
      p.inverse_rope = {cos.data(), sin.data(), dims.rope, kPositions, RopeLayout::kInterleaved};
      p.positions = positions.data();
    }
    p.out = out.data();
    p.out_row_stride = out_row_stride;
    p.out_head_stride = out_head_stride;
    p.lse = lse.data();
    p.lse_stride = lse_stride;
    return p;
  }

  // [rows, heads, value] and then [rows, heads] of lse.
  std::vector<float> Results() const {
    std::vector<float> values;
    for (int32_t row = 0; row < num_rows; ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) {
        const float* o = out.data() + row * out_row_stride + h * out_head_stride;
        values.insert(values.end(), o, o + dims.value);
      }
    }
    for (int32_t row = 0; row < num_rows; ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) values.push_back(lse[h * lse_stride + row]);
    }
    return values;
  }

  std::vector<double> Reference() const {
    std::vector<double> values, lses;
    const int32_t entry = dims.dim + dims.rope;
    for (int32_t row = 0; row < num_rows; ++row) {
      std::vector<const float*> keys;
      for (const Source& source : sources) {
        for (const int32_t slot : source.lists[row]) {
          keys.push_back(&source.values[int64_t{slot} * entry]);
        }
      }
      for (int32_t h = 0; h < dims.heads; ++h) {
        const float* query = q.data() + row * q_row_stride + h * q_head_stride;
        std::vector<double> weights;
        double sum = 0;
        for (const float* key : keys) {
          double dot = 0;
          for (int32_t d = 0; d < entry; ++d) dot += static_cast<double>(query[d]) * key[d];
          weights.push_back(std::exp(0.1f * dot));
          sum += weights.back();
        }
        lses.push_back(keys.empty() ? -kInfinity : std::log(sum));
        const double denominator = sum + (sink.empty() ? 0 : std::exp(double{sink[h]}));
        std::vector<double> o(dims.value);
        for (size_t j = 0; j < keys.size(); ++j) {
          for (int32_t d = 0; d < dims.value; ++d) o[d] += weights[j] / denominator * keys[j][d];
        }
        if (inverse_rope) {
          double* x = o.data() + dims.value - dims.rope;
          for (int32_t i = 0; i < dims.rope / 2; ++i) {
            const double c = cos[positions[row] * dims.rope / 2 + i];
            const double s = -sin[positions[row] * dims.rope / 2 + i];
            const double a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * c - b * s;
            x[2 * i + 1] = b * c + a * s;
          }
        }
        values.insert(values.end(), o.begin(), o.end());
      }
    }
    values.insert(values.end(), lses.begin(), lses.end());
    return values;
  }

  static constexpr int32_t kPositions = 40;
  Dims dims;
  int32_t num_rows;
  std::vector<Source> sources;
  int64_t q_row_stride, q_head_stride, out_row_stride, out_head_stride, lse_stride;
  std::vector<float> q, out, lse, sink, cos, sin;
  std::vector<int32_t> positions;
  bool inverse_rope = false;
};

// `count` different slots below `num_slots`, in no order.
inline std::vector<int32_t> SomeSlots(int32_t count, int32_t num_slots, uint32_t seed) {
  std::vector<int32_t> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(seed));
  slots.resize(count);
  return slots;
}

inline Case V32Case(KvFormat format, const Dims& dims = {6, 130, 6, 130}) {
  Case c(dims, 5);
  std::vector<std::vector<int32_t>> lists;
  for (const int32_t count : {1, 31, 32, 100, 0}) {
    lists.push_back(SomeSlots(count, 160, static_cast<uint32_t>(count)));
  }
  c.sources.emplace_back(dims, format, /*block_size=*/16, /*num_blocks=*/10, lists, 9);
  return c;
}

// A window and compressed entries in pages of other sizes, sinks and the way back of the rotation.
inline Case V4Case(KvFormat window, KvFormat compressed, const Dims& dims = {70, 70, 6, 76}) {
  Case c(dims, 4);
  c.sources.emplace_back(
      dims, window, 24, 4,
      std::vector<std::vector<int32_t>>{SomeSlots(24, 96, 1), SomeSlots(1, 96, 2), {}, {}}, 10);
  c.sources.emplace_back(
      dims, compressed, 2, 60,
      std::vector<std::vector<int32_t>>{SomeSlots(90, 120, 3), {}, SomeSlots(5, 120, 4), {}}, 11);
  c.sink = RandomTensor(dims.heads, 12, 2);
  c.inverse_rope = true;
  return c;
}

}  // namespace kernels::sparse

#endif  // TESTS_KERNELS_SPARSE_CASE_H_

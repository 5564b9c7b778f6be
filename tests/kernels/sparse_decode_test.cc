#include "kernels/cpu/sparse_decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/absorbed_decode.h"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/rope.h"
#include "kernels/store_kv.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

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
    Lay(/*width=*/128, /*holes=*/{});
  }

  void Store(int32_t slot) {
    if (slot < 0 || slot >= num_slots) return;
    pages.base = memory.data();
    const int32_t entry = dims.dim + dims.rope;
    float* at = &values[int64_t{slot} * entry];
    StoreEntry(pages, PlaceOfSlot(pages, slot), at, dims.dim, at + dims.dim, dims.rope);
    LoadEntry(pages, PlaceOfSlot(pages, slot), dims.dim, dims.rope, at, at + dims.dim);
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
  Case(const Dims& dims, int32_t num_rows) : dims(dims), num_rows(num_rows) {
    q_head_stride = dims.dim + dims.rope + 1;
    q_row_stride = dims.heads * q_head_stride + 2;
    out_head_stride = dims.value + 3;
    out_row_stride = dims.heads * out_head_stride + 1;
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

  std::vector<float> Run(ThreadPool& pool) {
    const absl::Status status = SparseDecode(pool, Params());
    EXPECT_TRUE(status.ok()) << status;
    return Results();
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
std::vector<int32_t> SomeSlots(int32_t count, int32_t num_slots, uint32_t seed) {
  std::vector<int32_t> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(seed));
  slots.resize(count);
  return slots;
}

Case V32Case(KvFormat format, const Dims& dims = {6, 130, 6, 130}) {
  Case c(dims, 5);
  std::vector<std::vector<int32_t>> lists;
  for (const int32_t count : {1, 31, 32, 100, 0}) {
    lists.push_back(SomeSlots(count, 160, static_cast<uint32_t>(count)));
  }
  c.sources.emplace_back(dims, format, /*block_size=*/16, /*num_blocks=*/10, lists, 9);
  return c;
}

// A window and compressed entries in pages of other sizes, sinks and the way back of the rotation.
Case V4Case(KvFormat window, KvFormat compressed, const Dims& dims = {70, 70, 6, 76}) {
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

// Sums of some hundred products of unit normals, and the exponential of one.
constexpr numerics::Tolerance kTolerance{.abs = 2e-6, .rel = 1e-4};

TEST(SparseDecodeTest, MatchesTheReferenceInEveryFormat) {
  ThreadPool pool(2);
  for (const KvFormat format : {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8Latent}) {
    Case c = V32Case(format);
    EXPECT_TRUE(AllClose(c.Run(pool), c.Reference(), kTolerance));
  }
  for (const KvFormat window : {KvFormat::kFloat32, KvFormat::kFp8SharedKv}) {
    for (const KvFormat compressed : {KvFormat::kBfloat16, KvFormat::kFp8SharedKv}) {
      Case c = V4Case(window, compressed);
      EXPECT_TRUE(AllClose(c.Run(pool), c.Reference(), kTolerance));
    }
  }
}

TEST(SparseDecodeTest, MatchesTheReferenceAtReleasedSizes) {
  ThreadPool pool(2);
  Case v32 = V32Case(KvFormat::kFp8Latent, {128, 512, 64, 512});
  EXPECT_TRUE(AllClose(v32.Run(pool), v32.Reference(), kTolerance));
  Case v4 = V4Case(KvFormat::kFp8SharedKv, KvFormat::kFp8SharedKv, {64, 448, 64, 512});
  EXPECT_TRUE(AllClose(v4.Run(pool), v4.Reference(), kTolerance));
}

TEST(SparseDecodeTest, OneHeadWithoutARotaryPart) {
  ThreadPool pool(1);
  Case c = V32Case(KvFormat::kBfloat16, {1, 3, 0, 2});
  EXPECT_TRUE(AllClose(c.Run(pool), c.Reference(), kTolerance));
}

TEST(SparseDecodeTest, ARowWithoutEntriesIsZero) {
  ThreadPool pool(2);
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kFloat32);
  c.positions[3] = -1;  // a padded row
  ASSERT_TRUE(SparseDecode(pool, c.Params()).ok());
  for (int32_t h = 0; h < c.dims.heads; ++h) {
    for (int32_t d = 0; d < c.dims.value; ++d) {
      ASSERT_EQ(c.out[3 * c.out_row_stride + h * c.out_head_stride + d], 0.0f);
    }
    ASSERT_EQ(c.lse[h * c.lse_stride + 3], -kInfinity);
  }
}

// What is no slot, padding and the width change no bit, and nothing there is looked at.
TEST(SparseDecodeTest, HolesInTheListsDoNotShow) {
  ThreadPool pool(2);
  Case c = V4Case(KvFormat::kFp8SharedKv, KvFormat::kBfloat16);
  const std::vector<float> expected = c.Run(pool);
  for (Source& source : c.sources) {
    source.Lay(256, {-1, kMin, kMax, source.num_slots, -7, source.num_slots + 5});
  }
  EXPECT_TRUE(BitEqual(c.Run(pool), expected));
  // Without lengths the whole width counts, and -1 is left out all the same.
  for (Source& source : c.sources) source.Lay(128, {});
  SparseDecodeParams params = c.Params();
  for (SparseSource& source : params.sources) source.lengths = nullptr;
  ASSERT_TRUE(SparseDecode(pool, params).ok());
  EXPECT_TRUE(BitEqual(c.Results(), expected));
}

TEST(SparseDecodeTest, NothingAtOrPastTheLengthIsLookedAt) {
  ThreadPool pool(1);
  Case c = V32Case(KvFormat::kFloat32);
  const std::vector<float> expected = c.Run(pool);
  Source& source = c.sources[0];
  int32_t unstored = 0;  // a slot of NaN
  const auto named = [&](const std::vector<int32_t>& list) {
    return std::find(list.begin(), list.end(), unstored) != list.end();
  };
  while (std::any_of(source.lists.begin(), source.lists.end(), named)) ++unstored;
  ASSERT_LT(unstored, source.num_slots);
  for (size_t row = 0; row < source.lists.size(); ++row) {
    for (int32_t i = source.lengths[row]; i < source.width; ++i) {
      source.indices[row * source.stride + i] = unstored;
    }
  }
  EXPECT_TRUE(BitEqual(c.Run(pool), expected));
}

TEST(SparseDecodeTest, ARowsBitsDoNotDependOnTheCall) {
  ThreadPool one(1), three(3);
  for (Case c :
       {V32Case(KvFormat::kFp8Latent), V4Case(KvFormat::kFp8SharedKv, KvFormat::kFloat32)}) {
    const std::vector<float> expected = c.Run(one);
    EXPECT_TRUE(BitEqual(c.Run(three), expected));
    // Row by row, last first.
    std::fill(c.out.begin(), c.out.end(), kNan);
    for (int32_t row = c.num_rows - 1; row >= 0; --row) {
      SparseDecodeParams p = c.Params();
      p.num_rows = 1;
      p.q += row * p.q_row_stride;
      p.q_rope += row * p.q_rope_row_stride;
      p.out += row * p.out_row_stride;
      p.lse += row;
      if (p.positions != nullptr) p.positions += row;
      for (SparseSource& source : p.sources) {
        if (source.indices == nullptr) continue;
        source.indices += row * source.index_stride;
        source.lengths += row;
      }
      ASSERT_TRUE(SparseDecode(three, p).ok());
    }
    EXPECT_TRUE(BitEqual(c.Results(), expected));
  }
}

TEST(SparseDecodeTest, InfiniteSinks) {
  ThreadPool pool(1);
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kFloat32);
  c.sink.assign(c.dims.heads, -kInfinity);
  const std::vector<float> none = c.Run(pool);
  c.sink.clear();
  EXPECT_TRUE(BitEqual(none, c.Run(pool)));
  c.sink.assign(c.dims.heads, kInfinity);
  ASSERT_TRUE(SparseDecode(pool, c.Params()).ok());
  for (int32_t row = 0; row < c.num_rows; ++row) {
    for (int32_t h = 0; h < c.dims.heads; ++h) {
      for (int32_t d = 0; d < c.dims.value; ++d) {
        ASSERT_EQ(c.out[row * c.out_row_stride + h * c.out_head_stride + d], 0.0f);
      }
    }
  }
}

// Over every key of a sequence it is dense decode.
TEST(SparseDecodeTest, AllKeysEqualAbsorbedDecode) {
  ThreadPool pool(2);
  const Dims dims{5, 48, 16, 48};
  constexpr int32_t kKeys = 100, kBlockSize = 16;
  Case c(dims, 1);
  std::vector<int32_t> all(kKeys);
  const std::vector<int32_t> blocks = {6, 2, 5, 0, 3, 1, 4};
  for (int32_t j = 0; j < kKeys; ++j) all[j] = blocks[j / kBlockSize] * kBlockSize + j % kBlockSize;
  c.sources.emplace_back(dims, KvFormat::kBfloat16, kBlockSize, 7,
                         std::vector<std::vector<int32_t>>{all}, 20);
  const std::vector<float> weights = RandomTensor(dims.heads * 7 * dims.value, 21);
  const WeightTensor tensor{
      .data = weights.data(), .dtype = DType::kFloat32, .rows = dims.heads * 7, .cols = dims.value};
  const auto w_uv = PackHeadLinear(pool, tensor, {dims.heads, 7, 0, 7, false});
  ASSERT_TRUE(w_uv.ok()) << w_uv.status();
  std::vector<float> sparse(dims.heads * 7, kNan), dense(dims.heads * 7, kNan);
  std::vector<std::byte> workspace(1 << 20, std::byte{0xff});

  SparseDecodeParams p = c.Params();
  p.w_uv = w_uv->get();
  p.v_head_dim = 7;
  p.out = sparse.data();
  p.out_row_stride = dims.heads * 7;
  p.out_head_stride = 7;
  p.workspace = workspace.data();
  ASSERT_TRUE(SparseDecode(pool, p).ok());

  const int32_t cu_q[] = {0, 1}, kv_len[] = {kKeys};
  const DecodeSplit split{0, 0, kKeys};
  AbsorbedDecodeParams d;
  d.num_seqs = 1;
  d.num_rows = 1;
  d.max_q_len = 1;
  d.max_splits_per_seq = 1;
  d.num_heads = dims.heads;
  d.kv_lora_rank = dims.dim;
  d.qk_rope_head_dim = dims.rope;
  d.v_head_dim = 7;
  d.softmax_scale = p.softmax_scale;
  d.cu_seqlens_q = cu_q;
  d.kv_len = kv_len;
  d.block_table = blocks.data();
  d.block_table_stride = static_cast<int64_t>(blocks.size());
  d.splits = &split;
  d.num_splits = 1;
  d.pages = p.sources[0].pages;
  d.q_latent = p.q;
  d.q_latent_row_stride = p.q_row_stride;
  d.q_latent_head_stride = p.q_head_stride;
  d.q_rope = p.q_rope;
  d.q_rope_row_stride = p.q_rope_row_stride;
  d.q_rope_head_stride = p.q_rope_head_stride;
  d.w_uv = w_uv->get();
  d.out = dense.data();
  d.out_row_stride = dims.heads * 7;
  d.out_head_stride = 7;
  d.workspace = workspace.data();
  ASSERT_TRUE(AbsorbedDecode(pool, d).ok());
  EXPECT_TRUE(AllClose<float>(sparse, dense, kTolerance));
}

TEST(SparseDecodeTest, RefusesWhatCannotBe) {
  ThreadPool pool(1);
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kBfloat16);
  const auto refused = [&](auto change, const char* message) {
    SparseDecodeParams p = c.Params();
    change(p);
    const absl::Status status = SparseDecode(pool, p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(message));
  };
  refused([](auto& p) { p.num_rows = -1; }, "-1 rows");
  refused([](auto& p) { p.num_heads = 0; }, "0 heads");
  refused([](auto& p) { p.value_dim = 77; }, "77 of them the value");
  refused([](auto& p) { p.sources[1].width = -1; }, "-1 indices");
  refused([](auto& p) { p.sources[0].index_stride = 5; }, "index stride 5");
  refused([](auto& p) { p.sources[0].pages.entry_bytes = 8; }, "8 bytes per entry");
  refused([](auto& p) { p.q = nullptr; }, "is null");
  refused([](auto& p) { p.positions = nullptr; }, "without positions");
  c.positions[2] = Case::kPositions;
  refused([](auto&) {}, "row 2: position 40");
  for (const float value : c.out) ASSERT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace kernels::cpu

#include "kernels/cpu/sparse_decode.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/absorbed_decode.h"
#include "kernels/cpu/head_linear.h"
#include "tests/kernels/random_tensor.h"
#include "tests/kernels/sparse_case.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

using sparse::Case;
using sparse::Dims;
using sparse::kInfinity;
using sparse::kMax;
using sparse::kMin;
using sparse::kNan;
using sparse::SomeSlots;
using sparse::Source;
using sparse::V32Case;
using sparse::V4Case;

std::vector<float> Attend(Case& c, ThreadPool& pool) {
  const absl::Status status = SparseDecode(pool, c.Params());
  EXPECT_TRUE(status.ok()) << status;
  return c.Results();
}

// Sums of some hundred products of unit normals, and the exponential of one.
constexpr numerics::Tolerance kTolerance{.abs = 2e-6, .rel = 1e-4};

TEST(SparseDecodeTest, MatchesTheReferenceInEveryFormat) {
  ThreadPool pool(2);
  for (const KvFormat format : {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8Latent}) {
    Case c = V32Case(format);
    EXPECT_TRUE(AllClose(Attend(c, pool), c.Reference(), kTolerance));
  }
  for (const KvFormat window : {KvFormat::kFloat32, KvFormat::kFp8SharedKv}) {
    for (const KvFormat compressed : {KvFormat::kBfloat16, KvFormat::kFp8SharedKv}) {
      Case c = V4Case(window, compressed);
      EXPECT_TRUE(AllClose(Attend(c, pool), c.Reference(), kTolerance));
    }
  }
}

TEST(SparseDecodeTest, MatchesTheReferenceAtReleasedSizes) {
  ThreadPool pool(2);
  Case v32 = V32Case(KvFormat::kFp8Latent, {128, 512, 64, 512});
  EXPECT_TRUE(AllClose(Attend(v32, pool), v32.Reference(), kTolerance));
  Case v4 = V4Case(KvFormat::kFp8SharedKv, KvFormat::kFp8SharedKv, {64, 448, 64, 512});
  EXPECT_TRUE(AllClose(Attend(v4, pool), v4.Reference(), kTolerance));
}

TEST(SparseDecodeTest, OneHeadWithoutARotaryPart) {
  ThreadPool pool(1);
  Case c = V32Case(KvFormat::kBfloat16, {1, 3, 0, 2});
  EXPECT_TRUE(AllClose(Attend(c, pool), c.Reference(), kTolerance));
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
  const std::vector<float> expected = Attend(c, pool);
  for (Source& source : c.sources) {
    source.Lay(256, {-1, kMin, kMax, source.num_slots, -7, source.num_slots + 5});
  }
  EXPECT_TRUE(BitEqual(Attend(c, pool), expected));
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
  const std::vector<float> expected = Attend(c, pool);
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
  EXPECT_TRUE(BitEqual(Attend(c, pool), expected));
}

TEST(SparseDecodeTest, ARowsBitsDoNotDependOnTheCall) {
  ThreadPool one(1), three(3);
  for (Case c :
       {V32Case(KvFormat::kFp8Latent), V4Case(KvFormat::kFp8SharedKv, KvFormat::kFloat32)}) {
    const std::vector<float> expected = Attend(c, one);
    EXPECT_TRUE(BitEqual(Attend(c, three), expected));
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
  const std::vector<float> none = Attend(c, pool);
  c.sink.clear();
  EXPECT_TRUE(BitEqual(none, Attend(c, pool)));
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

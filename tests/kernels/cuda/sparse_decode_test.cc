#include "kernels/sparse_decode.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/sparse_case.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using sparse::Case;
using sparse::Dims;
using sparse::kInfinity;
using sparse::kMax;
using sparse::kMin;
using sparse::SomeSlots;
using sparse::Source;
using sparse::V32Case;
using sparse::V4Case;
using ::testing::Each;
using ::testing::HasSubstr;

// A score is one sum of up to 576 products of unit normals in order, 0.1 of it an exponent.
constexpr numerics::Tolerance kTolerance{.abs = 1e-5, .rel = 2e-4};

class CudaSparseDecodeTest : public DeviceTest {
 protected:
  using DeviceTest::DeviceTest;

  // The case's parameters over copies on the device.
  SparseDecodeParams OnDevice(Case& c) {
    SparseDecodeParams p = c.Params();
    int32_t width = 0;
    for (SparseSource& source : p.sources) {
      if (source.indices == nullptr) continue;
      Source& from = c.sources[static_cast<size_t>(&source - p.sources)];
      source.pages.base = UploadBytes(from.memory);
      source.indices = Upload(from.indices);
      source.lengths = Upload(from.lengths);
      width += source.width;
    }
    p.q = Upload(c.q);
    p.q_rope = p.q + c.dims.dim;
    if (p.sink != nullptr) p.sink = Upload(c.sink);
    if (p.positions != nullptr) {
      p.positions = Upload(c.positions);
      p.inverse_rope.cos = Upload(c.cos);
      p.inverse_rope.sin = Upload(c.sin);
    }
    p.out = Upload(c.out);
    p.lse = Upload(c.lse);
    p.workspace = Workspace(device_->attention().SparseDecodeWorkspaceBytes(
        p.num_rows, width, p.num_heads, p.value_dim));
    return p;
  }
  std::vector<float> Results(Case& c, const SparseDecodeParams& p) {
    c.out = Download(p.out, c.out.size());
    c.lse = Download(p.lse, c.lse.size());
    return c.Results();
  }
  std::vector<float> Run(Case& c) {
    const SparseDecodeParams p = OnDevice(c);
    const absl::Status status = device_->attention().SparseDecode({}, p);
    EXPECT_TRUE(status.ok()) << status;
    return Results(c, p);
  }
};

TEST_F(CudaSparseDecodeTest, MatchesTheReferenceInEveryFormat) {
  for (const KvFormat format : {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8Latent}) {
    Case c = V32Case(format);
    EXPECT_TRUE(AllClose(Run(c), c.Reference(), kTolerance));
  }
  for (const KvFormat window : {KvFormat::kFloat32, KvFormat::kFp8SharedKv}) {
    for (const KvFormat compressed : {KvFormat::kBfloat16, KvFormat::kFp8SharedKv}) {
      Case c = V4Case(window, compressed);
      EXPECT_TRUE(AllClose(Run(c), c.Reference(), kTolerance));
    }
  }
}

TEST_F(CudaSparseDecodeTest, MatchesTheReferenceAtReleasedSizes) {
  Case v32 = V32Case(KvFormat::kFp8Latent, {128, 512, 64, 512});
  EXPECT_TRUE(AllClose(Run(v32), v32.Reference(), kTolerance));
  Case v4 = V4Case(KvFormat::kFp8SharedKv, KvFormat::kFp8SharedKv, {64, 448, 64, 512});
  EXPECT_TRUE(AllClose(Run(v4), v4.Reference(), kTolerance));
  Case one = V32Case(KvFormat::kBfloat16, {1, 3, 0, 2});
  EXPECT_TRUE(AllClose(Run(one), one.Reference(), kTolerance));
}

TEST_F(CudaSparseDecodeTest, ARowWithoutEntriesIsZero) {
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kFp8SharedKv);
  c.positions[3] = -1;  // a padded row
  Run(c);
  for (int32_t h = 0; h < c.dims.heads; ++h) {
    const float* out = c.out.data() + 3 * c.out_row_stride + h * c.out_head_stride;
    EXPECT_THAT(std::vector<float>(out, out + c.dims.value), Each(0.0f));
    EXPECT_EQ(c.lse[h * c.lse_stride + 3], -kInfinity);
  }
}

// What is no slot, padding and the width change no bit, and nothing there is looked at.
TEST_F(CudaSparseDecodeTest, HolesInTheListsDoNotShow) {
  Case c = V4Case(KvFormat::kFp8SharedKv, KvFormat::kBfloat16);
  const std::vector<float> expected = Run(c);
  for (Source& source : c.sources) {
    source.Lay(384, {-1, kMin, kMax, source.num_slots, -7, source.num_slots + 5});
  }
  EXPECT_TRUE(BitEqual(Run(c), expected));
  for (Source& source : c.sources) source.Lay(128, {});
  SparseDecodeParams p = OnDevice(c);
  for (SparseSource& source : p.sources) source.lengths = nullptr;
  ASSERT_TRUE(device_->attention().SparsePrefill({}, p).ok());
  EXPECT_TRUE(BitEqual(Results(c, p), expected));
}

TEST_F(CudaSparseDecodeTest, NothingAtOrPastTheLengthIsLookedAt) {
  Case c = V32Case(KvFormat::kFloat32);
  const std::vector<float> expected = Run(c);
  Source& source = c.sources[0];
  for (size_t row = 0; row < source.lists.size(); ++row) {
    for (int32_t i = source.lengths[row]; i < source.width; ++i) {
      source.indices[row * source.stride + i] = source.lists[1][0];
    }
  }
  EXPECT_TRUE(BitEqual(Run(c), expected));
}

TEST_F(CudaSparseDecodeTest, ARowsBitsDoNotDependOnTheCall) {
  for (Case c :
       {V32Case(KvFormat::kFp8Latent), V4Case(KvFormat::kFp8SharedKv, KvFormat::kFloat32)}) {
    const std::vector<float> expected = Run(c);
    c.out.assign(c.out.size(), kNan);
    const SparseDecodeParams all = OnDevice(c);
    for (int32_t row = c.num_rows - 1; row >= 0; --row) {
      SparseDecodeParams p = all;
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
      ASSERT_TRUE(device_->attention().SparseDecode({}, p).ok());
    }
    EXPECT_TRUE(BitEqual(Results(c, all), expected));
  }
}

TEST_F(CudaSparseDecodeTest, InfiniteSinks) {
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kFloat32);
  c.sink.assign(c.dims.heads, -kInfinity);
  const std::vector<float> none = Run(c);
  c.sink.clear();
  EXPECT_TRUE(BitEqual(none, Run(c)));
  c.sink.assign(c.dims.heads, kInfinity);
  Run(c);
  for (int32_t row = 0; row < c.num_rows; ++row) {
    for (int32_t h = 0; h < c.dims.heads; ++h) {
      const float* out = c.out.data() + row * c.out_row_stride + h * c.out_head_stride;
      ASSERT_THAT(std::vector<float>(out, out + c.dims.value), Each(0.0f));
    }
  }
}

TEST_F(CudaSparseDecodeTest, ValuesGoThroughWuv) {
  Case c = V32Case(KvFormat::kFp8Latent, {6, 130, 6, 130});
  const std::vector<float> weights = RandomTensor(c.dims.heads * 7 * c.dims.value, 21);
  const WeightTensor tensor{.data = weights.data(),
                            .dtype = DType::kFloat32,
                            .rows = c.dims.heads * 7,
                            .cols = c.dims.value};
  const HeadSlice slice{c.dims.heads, 7, 0, 7, false};
  const auto here = host_->PackHeadLinear(tensor, slice);
  const auto there = device_->PackHeadLinear(tensor, slice);
  ASSERT_TRUE(here.ok() && there.ok());
  const size_t size = static_cast<size_t>(c.num_rows * c.dims.heads * 7);
  const auto with_w_uv = [&](SparseDecodeParams p, const PackedHeadLinear& w_uv, float* out) {
    p.w_uv = &w_uv;
    p.v_head_dim = 7;
    p.out = out;
    p.out_row_stride = c.dims.heads * 7;
    p.out_head_stride = 7;
    return p;
  };
  std::vector<float> expected(size, kNan);
  std::vector<std::byte> workspace(static_cast<size_t>(
      host_->attention().SparseDecodeWorkspaceBytes(c.num_rows, 128, c.dims.heads, c.dims.value)));
  SparseDecodeParams p = with_w_uv(c.Params(), **here, expected.data());
  p.workspace = workspace.data();
  ASSERT_TRUE(host_->attention().SparseDecode({}, p).ok());
  float* out = Upload(std::vector<float>(size, kNan));
  ASSERT_TRUE(device_->attention().SparseDecode({}, with_w_uv(OnDevice(c), **there, out)).ok());
  EXPECT_TRUE(AllClose<float>(Download(out, size), expected, {.abs = 2e-5, .rel = 1e-4}));
}

TEST_F(CudaSparseDecodeTest, RefusesWhatCannotBe) {
  Case c = V4Case(KvFormat::kFloat32, KvFormat::kBfloat16);
  SparseDecodeParams p = OnDevice(c);
  p.workspace = nullptr;
  EXPECT_THAT(device_->attention().SparseDecode({}, p).ToString(), HasSubstr("workspace"));
  p.num_heads = 0;
  EXPECT_THAT(device_->attention().SparsePrefill({}, p).ToString(), HasSubstr("0 heads"));
  c.positions[2] = Case::kPositions;
  ASSERT_TRUE(device_->attention().SparseDecode({}, OnDevice(c)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("row 2: position 40 is outside the rope table"));
}

// Tensor cores: queries, keys and weights rounded to bf16.
class CudaSparseLatentTest : public CudaSparseDecodeTest,
                             public ::testing::WithParamInterface<KvFormat> {
 protected:
  CudaSparseLatentTest() : CudaSparseDecodeTest(/*bfloat16=*/true) {}

  // Queries become numbers that bf16 holds.
  static void Round(Case& c) {
    for (float& value : c.q) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      bits &= 0xffff0000;
      std::memcpy(&value, &bits, sizeof(bits));
    }
  }
  // Lists of these lengths over one sequence's entries.
  static Case Make(int32_t heads, const std::vector<int32_t>& counts) {
    const int32_t num_rows = static_cast<int32_t>(counts.size());
    Case c({heads, 512, 64, 512}, num_rows, /*gap=*/4);
    std::vector<std::vector<int32_t>> lists;
    for (const int32_t count : counts) {
      lists.push_back(SomeSlots(count, 2304, static_cast<uint32_t>(count)));
    }
    c.sources.emplace_back(c.dims, GetParam(), /*block_size=*/64, /*num_blocks=*/36, lists, 9);
    c.sources[0].Lay(2304, {-1, c.sources[0].num_slots});
    Round(c);
    return c;
  }
  // A window and compressed entries, sinks and the way back of the rotation.
  static Case MakeV4(KvFormat format, int32_t heads, int32_t most_entries = 1000) {
    Case c({heads, 448, 64, 512}, 5, /*gap=*/4);
    const std::vector<std::vector<int32_t>> windows = {
        SomeSlots(126, 256, 1), SomeSlots(1, 256, 2), {}, {}, SomeSlots(100, 256, 3)};
    const std::vector<std::vector<int32_t>> entries = {SomeSlots(most_entries / 2, 1024, 4),
                                                       {},
                                                       SomeSlots(70, 1024, 5),
                                                       {},
                                                       SomeSlots(most_entries, 1024, 6)};
    c.sources.emplace_back(c.dims, format, /*block_size=*/128, /*num_blocks=*/2, windows, 10);
    c.sources.emplace_back(c.dims, format, /*block_size=*/2, /*num_blocks=*/512, entries, 11);
    c.sources[0].Lay(128, {-1, kMin});
    c.sources[1].Lay(most_entries <= 127 ? 128 : 1024, {kMax});
    c.sink = RandomTensor(heads, 12, 2);
    c.inverse_rope = true;
    Round(c);
    return c;
  }
  // The weights' rounding, half a bf16 step each, in sums of products with values up to 4.
  static constexpr numerics::Tolerance kRounded{.abs = 4e-3, .rel = 2.0 / 128, .cosine = 1e-5};
};

TEST_P(CudaSparseLatentTest, MatchesTheReference) {
  Case many = Make(128, {1, 63, 64, 65, 300, 0, 2000});
  EXPECT_TRUE(AllClose(Run(many), many.Reference(), kRounded));
  Case one = Make(16, {2000});  // shared out
  EXPECT_TRUE(AllClose(Run(one), one.Reference(), kRounded));
  Case few = Make(70, {0, 129, 1000});
  EXPECT_TRUE(AllClose(Run(few), few.Reference(), kRounded));
}

// Lists of up to 256 indices make two parts, which a cluster of blocks folds: of a list of 40 the
// second one is empty.
TEST_P(CudaSparseLatentTest, TwoPartsOfARow) {
  Case c = Make(20, {200, 40, 0, 65, 250});
  c.sources[0].Lay(256, {-1, kMin});
  const std::vector<float> folded = Run(c);
  EXPECT_TRUE(AllClose(folded, c.Reference(), kRounded));
  EXPECT_TRUE(BitEqual(Run(c), folded));
}

// Lists without holes are read where they stand, others are listed anew.
TEST_P(CudaSparseLatentTest, HolesInTheListsDoNotShow) {
  Case c = Make(128, {1, 63, 300, 0, 2000});
  const std::vector<float> with_holes = Run(c);
  c.sources[0].Lay(2304, {});
  EXPECT_TRUE(BitEqual(Run(c), with_holes));
  EXPECT_TRUE(AllClose(with_holes, c.Reference(), kRounded));
}

TEST_P(CudaSparseLatentTest, TheSameEveryTime) {
  Case c = Make(128, {500, 2000});
  const std::vector<float> first = Run(c);
  EXPECT_TRUE(BitEqual(Run(c), first));
}

// What is behind the last key of a row's list, and entries of nobody, are not numbers.
TEST_P(CudaSparseLatentTest, LargeQueriesStayFinite) {
  Case c = Make(64, {100, 64});
  for (size_t i = 0; i < c.q.size(); i += 97) c.q[i] = i % 2 == 0 ? 16384.0f : -16384.0f;
  for (const float value : Run(c)) ASSERT_TRUE(std::isfinite(value));
}

// Values that an fp8 entry holds with scales of 64 and more, beside small ones.
TEST_P(CudaSparseLatentTest, LargeValues) {
  Case c = Make(16, {100});
  Source& source = c.sources[0];
  const int32_t entry = c.dims.dim + c.dims.rope;
  for (size_t i = 0; i < source.lists[0].size(); i += 3) {
    const int32_t slot = source.lists[0][i];
    for (int32_t d = 0; d < 300; ++d) source.values[int64_t{slot} * entry + d] *= 3e4f;
    source.Store(slot);
  }
  for (float& value : c.q) value *= 0x1p-12f;
  EXPECT_TRUE(AllClose(Run(c), c.Reference(), {.abs = 60, .rel = 3.0 / 128, .cosine = 1e-4}));
}

class CudaSparseSharedKvTest : public CudaSparseLatentTest {};

TEST_P(CudaSparseSharedKvTest, MatchesTheReference) {
  for (const int32_t heads : {20, 64, 70}) {
    for (const int32_t most_entries : {1000, 120}) {  // two parts: folded by a cluster
      Case c = MakeV4(GetParam(), heads, most_entries);
      EXPECT_TRUE(AllClose(Run(c), c.Reference(), kRounded));
      c.sink.clear();
      c.inverse_rope = false;
      EXPECT_TRUE(AllClose(Run(c), c.Reference(), kRounded));
    }
  }
}

TEST_P(CudaSparseSharedKvTest, HolesInEitherListDoNotShow) {
  for (const int32_t most_entries : {1000, 120}) {
    Case c = MakeV4(GetParam(), 64, most_entries);
    const std::vector<float> with_holes = Run(c);
    c.sources[0].Lay(128, {});
    EXPECT_TRUE(BitEqual(Run(c), with_holes));
    c.sources[1].Lay(most_entries <= 127 ? 128 : 1024, {});
    EXPECT_TRUE(BitEqual(Run(c), with_holes));
  }
}

TEST_P(CudaSparseSharedKvTest, InfiniteSinks) {
  Case c = MakeV4(GetParam(), 64);
  c.sink.assign(c.dims.heads, -kInfinity);
  const std::vector<float> none = Run(c);
  c.sink.clear();
  EXPECT_TRUE(BitEqual(none, Run(c)));
  c.sink.assign(c.dims.heads, kInfinity);
  Run(c);
  for (int32_t h = 0; h < c.dims.heads; ++h) {
    const float* out = c.out.data() + h * c.out_head_stride;
    ASSERT_THAT(std::vector<float>(out, out + c.dims.value), Each(0.0f));
  }
}

TEST_P(CudaSparseSharedKvTest, APositionOutsideTheTableIsReported) {
  Case c = MakeV4(GetParam(), 64);
  c.positions[2] = Case::kPositions;
  ASSERT_TRUE(device_->attention().SparseDecode({}, OnDevice(c)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("row 2: position 40 is outside the rope table"));
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaSparseSharedKvTest,
                         ::testing::Values(KvFormat::kBfloat16, KvFormat::kFp8SharedKv));
INSTANTIATE_TEST_SUITE_P(Formats, CudaSparseLatentTest,
                         ::testing::Values(KvFormat::kBfloat16, KvFormat::kFp8Latent));

}  // namespace
}  // namespace kernels

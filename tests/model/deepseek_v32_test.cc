// Equalities that need no oracle, around index_topk (64 and 24 in these models).

#include "model/deepseek_v32.h"

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/editable_checkpoint.h"
#include "tests/model/network_equalities.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

class DeepseekV32Test : public ::testing::TestWithParam<const char*> {};

// Chunks that end before, at and after the last position that sees every key, and a cache in each
// of its forms.
TEST_P(DeepseekV32Test, ChunkedEqualsWholeBitForBit) {
  for (const KvCacheDtype dtype :
       {KvCacheDtype::kFloat32, KvCacheDtype::kBfloat16, KvCacheDtype::kFp8}) {
    NetworkOptions options = NetworkRunner::Options();
    options.piece_tokens = 100;
    options.kv_cache_dtype = dtype;
    NetworkRunner runner(GoldenModel(GetParam()), options);
    const std::vector<int32_t> tokens = RandomTokens(301, runner.vocab_size(), 1);
    engine::Sequence whole = runner.NewSequence(tokens);
    const std::vector<float> expected = runner.Run(whole, 512);
    const int32_t top_k = runner.network().config().index_topk;
    for (const int32_t chunk : {7, top_k - 1, top_k, top_k + 1, 130}) {
      SCOPED_TRACE(testing::Message() << KvCacheDtypeName(dtype) << " chunk " << chunk);
      engine::Sequence chunked = runner.NewSequence(tokens);
      EXPECT_TRUE(numerics::BitEqual(runner.Run(chunked, chunk), expected));
      EXPECT_EQ(runner.CacheBytes(chunked), runner.CacheBytes(whole));
      engine::ReleaseBlocks(chunked, runner.pool());
    }
  }
}

TEST_P(DeepseekV32Test, ThreadsDoNotChangeABit) {
  ExpectThreadsDoNotChangeABit(GoldenModel(GetParam()));
}

TEST_P(DeepseekV32Test, AbsorbedEqualsUnabsorbed) {
  ExpectAbsorbedEqualsUnabsorbed(GoldenModel(GetParam()));
}

// A mixed step (decodes, absorbed chunks, ragged chunks before, across and past index_topk) gives
// every sequence the bits it gets alone.
TEST_P(DeepseekV32Test, ABatchGivesEverySequenceItsOwnBits) {
  NetworkOptions options = NetworkRunner::Options();
  options.piece_tokens = 128;
  NetworkRunner runner(GoldenModel(GetParam()), options);
  const BatchPart cases[] = {{70, 1, true},   {300, 1, true},   {5, 1, true},   {20, 9, true},
                             {129, 9, true},  {0, 40, false},   {0, 1, false},  {190, 64, false},
                             {20, 80, false}, {64, 130, false}, {0, 150, false}};
  ExpectABatchGivesEverySequenceItsOwnBits(runner, cases);
}

// While every key is selected the indexer does not show: it is V3.
TEST_P(DeepseekV32Test, UpToTopKItIsV3) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel(GetParam()));
  const int32_t top_k = checkpoint.config["index_topk"].get<int32_t>();
  checkpoint.config["model_type"] = "deepseek_v3";
  const std::string dir = ::testing::TempDir() + "/deepseek_v32_test_" + GetParam();
  checkpoint.Write(dir);
  NetworkRunner dense(dir), sparse(GoldenModel(GetParam()));
  const std::vector<int32_t> tokens = RandomTokens(top_k + 40, sparse.vocab_size(), 5);
  engine::Sequence a = dense.NewSequence(tokens), b = sparse.NewSequence(tokens);
  const std::vector<float> expected = dense.Run(a, 512), actual = sparse.Run(b, 512);
  const size_t same = static_cast<size_t>(top_k) * sparse.vocab_size();
  EXPECT_TRUE(numerics::BitEqual(absl::MakeConstSpan(actual).first(same),
                                 absl::MakeConstSpan(expected).first(same)));
  EXPECT_FALSE(numerics::AllClose<float>(absl::MakeConstSpan(actual).subspan(same),
                                         absl::MakeConstSpan(expected).subspan(same),
                                         {.abs = 1e-3}));
  // Decodes too, in another order of summation.
  engine::Sequence c = dense.NewSequence(tokens), d = sparse.NewSequence(tokens);
  const std::vector<float> dense_decoded = dense.Run(c, 512, 8), decoded = sparse.Run(d, 512, 8);
  EXPECT_TRUE(numerics::AllClose<float>(absl::MakeConstSpan(decoded).first(same),
                                        absl::MakeConstSpan(dense_decoded).first(same),
                                        {.abs = 1e-4}));
}

INSTANTIATE_TEST_SUITE_P(Fixtures, DeepseekV32Test,
                         ::testing::Values("v32", "v32_odd", "v32_native"),
                         [](const auto& info) { return std::string(info.param); });

TEST(PrefillPiecesTest, LeavesOutRowsPastTheRaggedOnes) {
  StepLimits limits;
  limits.max_tokens = 512;
  limits.max_seqs = 4;
  limits.max_blocks_per_seq = 8;
  StepPlan plan(limits);
  engine::PlanBuilder builder(/*block_size=*/64, plan);
  builder.Begin(1);
  const auto add = [&](int32_t cached, int32_t fresh, int32_t first_block) {
    engine::Sequence seq;
    seq.tokens.assign(cached + fresh, 0);
    seq.num_computed = cached;
    for (int32_t i = 0; i * 64 < cached + fresh; ++i) seq.blocks.push_back(first_block + i);
    builder.Add(seq, fresh, /*absorbed=*/false, false);
  };
  add(80, 60, 10);   // rows 0..60 at positions 80..140: the first 20 are ragged
  add(100, 50, 20);  // rows 60..110: none
  add(0, 30, 30);    // rows 110..140: all
  add(0, 101, 40);   // rows 140..241: all but the last
  PrefillPieces pieces(limits, /*block_size=*/64, /*piece_tokens=*/64, /*ragged_positions=*/100);
  pieces.Make(plan);
  // Round 1: 64 | 30 | 64.  Round 2: 36 of the first; 36 of the last do not fit beside it.
  ASSERT_EQ(pieces.passes().size(), 5u);
  const auto entry = [&](size_t pass) { return pieces.passes()[pass].first_entry; };
  EXPECT_EQ(pieces.passes()[0].num_keys, 64);
  EXPECT_EQ(pieces.q_row_begin()[entry(0)], 0);
  EXPECT_EQ(pieces.cu_seqlens_q()[entry(0) + 1], 20);
  EXPECT_EQ(pieces.q_row_begin()[entry(1)], 110);
  EXPECT_EQ(pieces.cu_seqlens_q()[entry(1) + 1], 30);
  EXPECT_EQ(pieces.q_row_begin()[entry(2)], 140);
  EXPECT_EQ(pieces.cu_seqlens_q()[entry(2) + 1], 100);
  EXPECT_EQ(pieces.passes()[3].num_keys, 36);
  EXPECT_EQ(pieces.causal_offset()[entry(3)], 80 - 64);
  EXPECT_EQ(pieces.cu_seqlens_q()[entry(3) + 1], 20);
  EXPECT_EQ(pieces.q_row_begin()[entry(4)], 140 + 64);
  EXPECT_EQ(pieces.cu_seqlens_q()[entry(4) + 1], 36);
  EXPECT_EQ(pieces.slots().size(), 64u + 30 + 64 + 36 + 36);
}

}  // namespace
}  // namespace model

// Equalities that need no oracle.

#include "model/deepseek_v2.h"

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/network_equalities.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

class DeepseekV2Test : public ::testing::TestWithParam<const char*> {};

// The bytes of the cache and the logits: chunk boundaries do not show, whatever the piece size.
TEST_P(DeepseekV2Test, ChunkedEqualsWholeBitForBit) {
  for (const int32_t piece_tokens : {64, 100, 512}) {
    NetworkOptions options = NetworkRunner::Options();
    options.piece_tokens = piece_tokens;
    NetworkRunner runner(GoldenModel(GetParam()), options);
    const std::vector<int32_t> tokens = RandomTokens(301, runner.vocab_size(), 1);
    engine::Sequence whole = runner.NewSequence(tokens);
    const std::vector<float> expected = runner.Run(whole, 512);
    const std::vector<int32_t> chunks =
        piece_tokens == 100 ? std::vector<int32_t>{7, 48, 64, 300} : std::vector<int32_t>{48, 129};
    for (const int32_t chunk : chunks) {
      SCOPED_TRACE(testing::Message() << "piece " << piece_tokens << " chunk " << chunk);
      engine::Sequence chunked = runner.NewSequence(tokens);
      const std::vector<float> actual = runner.Run(chunked, chunk);
      EXPECT_TRUE(numerics::BitEqual(actual, expected));
      EXPECT_EQ(runner.CacheBytes(chunked), runner.CacheBytes(whole));
      engine::ReleaseBlocks(chunked, runner.pool());
    }
  }
}

TEST_P(DeepseekV2Test, ThreadsDoNotChangeABit) {
  ExpectThreadsDoNotChangeABit(GoldenModel(GetParam()));
}

TEST_P(DeepseekV2Test, AbsorbedEqualsUnabsorbed) {
  ExpectAbsorbedEqualsUnabsorbed(GoldenModel(GetParam()));
}

// A mixed step (decodes, an absorbed chunk, ragged chunks with and without a prefix) gives every
// sequence the bits it gets alone.
TEST_P(DeepseekV2Test, ABatchGivesEverySequenceItsOwnBits) {
  NetworkOptions options = NetworkRunner::Options();
  options.piece_tokens = 128;
  NetworkRunner runner(GoldenModel(GetParam()), options);
  const BatchPart cases[] = {{70, 1, true},    {300, 1, true},   {5, 1, true},
                             {129, 9, true},   {0, 40, false},   {0, 1, false},
                             {190, 64, false}, {64, 130, false}, {0, 64, false}};
  ExpectABatchGivesEverySequenceItsOwnBits(runner, cases);
}

TEST_P(DeepseekV2Test, ABfloat16CacheStaysNear) {
  NetworkOptions options = NetworkRunner::Options();
  NetworkRunner exact(GoldenModel(GetParam()), options);
  options.kv_cache_dtype = KvCacheDtype::kBfloat16;
  NetworkRunner rounded(GoldenModel(GetParam()), options);
  const std::vector<int32_t> tokens = RandomTokens(100, exact.vocab_size(), 4);
  engine::Sequence a = exact.NewSequence(tokens);
  engine::Sequence b = rounded.NewSequence(tokens);
  const std::vector<float> expected = exact.Run(a, 512);
  const std::vector<float> whole = rounded.Run(b, 512);
  double sum = 0;
  for (size_t i = 0; i < whole.size(); ++i) sum += std::abs(whole[i] - expected[i]);
  const double mean = sum / static_cast<double>(whole.size());
  EXPECT_GT(mean, 1e-5);  // it is rounded indeed
  EXPECT_LT(mean, 0.1);   // and, by the fixtures README's bf16 table, not far off
  engine::Sequence c = rounded.NewSequence(tokens);
  EXPECT_TRUE(numerics::BitEqual(rounded.Run(c, 13), whole));
}

INSTANTIATE_TEST_SUITE_P(Fixtures, DeepseekV2Test,
                         ::testing::Values("v2_lite", "v2_group", "v3_odd", "v3_fp8"),
                         [](const auto& info) { return std::string(info.param); });

TEST(PrefillPiecesTest, CutsAtAbsoluteMultiplesAndPacksSeveralSequences) {
  StepLimits limits;
  limits.max_tokens = 512;
  limits.max_seqs = 4;
  limits.max_blocks_per_seq = 8;
  StepPlan plan(limits);
  engine::PlanBuilder builder(/*block_size=*/64, plan);
  builder.Begin(1);
  const auto add = [&](int32_t cached, int32_t fresh, int32_t first_block, bool absorbed) {
    engine::Sequence seq;
    seq.tokens.assign(cached + fresh, 0);
    seq.num_computed = cached;
    for (int32_t i = 0; i * 64 < cached + fresh; ++i) seq.blocks.push_back(first_block + i);
    builder.Add(seq, fresh, absorbed, false);
  };
  add(10, 1, 1, true);      // not ragged: no pieces
  add(100, 50, 10, false);  // keys 0..150, rows 1..51
  add(0, 20, 20, false);    // keys 0..20, rows 51..71
  add(0, 110, 30, false);   // keys 0..110, rows 71..181
  PrefillPieces pieces(limits, /*block_size=*/64, /*piece_tokens=*/128);
  pieces.Make(plan);
  // Round 1: 128 | 20 + (110 does not fit) | 110.  Round 2: the rest of the first.
  ASSERT_EQ(pieces.passes().size(), 4u);
  const auto& pass = pieces.passes();
  EXPECT_EQ(pass[0].num_keys, 128);
  EXPECT_EQ(pass[1].num_keys, 20);
  EXPECT_EQ(pass[2].num_keys, 110);
  EXPECT_EQ(pass[3].num_keys, 22);
  EXPECT_FALSE(pass[2].accumulate);
  EXPECT_TRUE(pass[3].accumulate);
  EXPECT_EQ(pieces.causal_offset()[pass[0].first_entry], 100);
  EXPECT_EQ(pieces.q_row_begin()[pass[0].first_entry], 1);
  EXPECT_EQ(pieces.cu_seqlens_q()[pass[0].first_entry + 1], 50);
  // Positions 100..127 see nothing of [128, 150).
  EXPECT_EQ(pieces.q_row_begin()[pass[3].first_entry], 1 + 28);
  EXPECT_EQ(pieces.cu_seqlens_q()[pass[3].first_entry + 1], 22);
  EXPECT_EQ(pieces.causal_offset()[pass[3].first_entry], 0);
  EXPECT_EQ(pieces.slots()[pass[0].first_slot + 65], 11 * 64 + 1);
  EXPECT_EQ(pieces.slots()[pass[3].first_slot], 12 * 64);
  EXPECT_EQ(pieces.slots().size(), 280u);
}

TEST(PrefillPiecesTest, NeverExceedsItsMaxima) {
  StepLimits limits;
  limits.max_tokens = 512;
  limits.max_seqs = 8;
  limits.max_blocks_per_seq = 4;
  for (const int32_t piece_tokens : {1, 60, 64, 256, 1000}) {
    StepPlan plan(limits);
    engine::PlanBuilder builder(/*block_size=*/64, plan);
    builder.Begin(1);
    for (int32_t i = 0; i < limits.max_seqs; ++i) {
      engine::Sequence seq;
      seq.tokens.assign(256, 0);
      seq.num_computed = 256 - 10;
      seq.blocks = {1, 2, 3, 4};
      builder.Add(seq, 10, false, false);
    }
    PrefillPieces pieces(limits, 64, piece_tokens);
    pieces.Make(plan);
    EXPECT_LE(static_cast<int64_t>(pieces.slots().size()), pieces.max_slots());
    EXPECT_LE(static_cast<int64_t>(pieces.cu_seqlens_q().size()), pieces.max_entries());
  }
}

}  // namespace
}  // namespace model

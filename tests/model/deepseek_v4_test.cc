// Equalities that need no oracle.

#include "model/deepseek_v4.h"

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/network_equalities.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

NetworkOptions WithCache(KvCacheDtype dtype) {
  NetworkOptions options = NetworkRunner::Options();
  options.kv_cache_dtype = dtype;
  return options;
}

absl::Span<const float> Rows(const std::vector<float>& logits, int32_t begin, int32_t count,
                             int32_t vocab) {
  return absl::MakeConstSpan(logits).subspan(static_cast<size_t>(begin) * vocab,
                                             static_cast<size_t>(count) * vocab);
}

class DeepseekV4Test : public ::testing::TestWithParam<const char*> {};

// Boundaries in the middle of CSA and HCA windows, at them, beside them, and chunks shorter than
// the sliding window and longer.
TEST_P(DeepseekV4Test, ChunkedEqualsWholeBitForBit) {
  for (const KvCacheDtype dtype :
       {KvCacheDtype::kFloat32, KvCacheDtype::kBfloat16, KvCacheDtype::kFp8}) {
    NetworkRunner runner(GoldenModel(GetParam()), WithCache(dtype));
    const std::vector<int32_t> tokens = RandomTokens(301, runner.vocab_size(), 1);
    engine::Sequence whole = runner.NewSequence(tokens);
    const std::vector<float> expected = runner.Run(whole, 512);
    const std::vector<int32_t> chunks = dtype == KvCacheDtype::kFloat32
                                            ? std::vector<int32_t>{3, 4, 5, 31, 48, 127, 128, 129}
                                            : std::vector<int32_t>{47};
    for (const int32_t chunk : chunks) {
      SCOPED_TRACE(testing::Message() << KvCacheDtypeName(dtype) << " chunk " << chunk);
      engine::Sequence chunked = runner.NewSequence(tokens);
      EXPECT_TRUE(numerics::BitEqual(runner.Run(chunked, chunk), expected));
      EXPECT_TRUE(runner.CacheBytes(chunked) == runner.CacheBytes(whole));
      engine::ReleaseBlocks(chunked, runner.pool());
    }
  }
}

// One boundary at every position of an HCA window, and so at every position of CSA windows and at
// the border of a block: what is behind it, in one piece, has the bits of the whole.
TEST_P(DeepseekV4Test, ABoundaryAtEveryPositionOfAWindowChangesNoBit) {
  NetworkRunner runner(GoldenModel(GetParam()));
  const int32_t window = runner.network().config().hca_ratio;
  const int32_t vocab = runner.vocab_size();
  const std::vector<int32_t> tokens = RandomTokens(2 * window + 3, vocab, 7);
  engine::Sequence whole = runner.NewSequence(tokens);
  const std::vector<float> expected = runner.Run(whole, 512);
  const std::string bytes = runner.CacheBytes(whole);
  // One sequence leads, a chunk of a token at a time; behind each of them another goes on.
  engine::Sequence leader = runner.NewSequence(tokens);
  engine::Sequence follower = runner.NewSequence(tokens);
  NetworkRunner::Part step{&leader, window - 1};
  runner.Step({&step, 1});
  step.num_tokens = 1;
  for (int32_t boundary = window; boundary <= 2 * window; ++boundary) {
    SCOPED_TRACE(testing::Message() << "boundary " << boundary);
    runner.Step({&step, 1});
    runner.CopyInto(leader, follower);
    EXPECT_TRUE(numerics::BitEqual(
        runner.Run(follower, 512),
        Rows(expected, boundary, static_cast<int32_t>(tokens.size()) - boundary, vocab)));
    EXPECT_TRUE(runner.CacheBytes(follower) == bytes);
  }
}

// Token by token through the borders of windows (127, 128, 129), of entries (4k + 3, 4k + 4) and of
// blocks (255, 256, 257).
TEST_P(DeepseekV4Test, DecodedEqualsPrefilledBitForBit) {
  for (const KvCacheDtype dtype : {KvCacheDtype::kFloat32, KvCacheDtype::kFp8}) {
    NetworkRunner runner(GoldenModel(GetParam()), WithCache(dtype));
    const std::vector<int32_t> tokens = RandomTokens(270, runner.vocab_size(), 2);
    engine::Sequence whole = runner.NewSequence(tokens);
    const std::vector<float> expected = runner.Run(whole, 512);
    for (const int32_t prefilled : {1, 250}) {
      SCOPED_TRACE(testing::Message() << KvCacheDtypeName(dtype) << " prefilled " << prefilled);
      engine::Sequence decoded = runner.NewSequence(tokens);
      EXPECT_TRUE(numerics::BitEqual(runner.Run(decoded, 512, prefilled), expected));
      EXPECT_TRUE(runner.CacheBytes(decoded) == runner.CacheBytes(whole));
      engine::ReleaseBlocks(decoded, runner.pool());
    }
  }
}

TEST_P(DeepseekV4Test, ThreadsDoNotChangeABit) {
  ExpectThreadsDoNotChangeABit(GoldenModel(GetParam()));
}

// A mixed step gives every sequence the bits it gets alone: decodes and chunks in all phases of
// their windows, a decode behind a chunk (its window is then in the buffer).
TEST_P(DeepseekV4Test, ABatchGivesEverySequenceItsOwnBits) {
  NetworkRunner runner(GoldenModel(GetParam()));
  const BatchPart cases[] = {{70, 1, true},    {300, 1, true}, {0, 1, true},   {127, 9, true},
                             {31, 1, true},    {0, 40, false}, {0, 1, false},  {190, 64, false},
                             {64, 130, false}, {23, 1, false}, {255, 2, false}};
  ExpectABatchGivesEverySequenceItsOwnBits(runner, cases);
}

// Rows that a replayed step has too many: of no sequence, without a slot.
TEST_P(DeepseekV4Test, PaddedRowsOfADecodeDoNotShow) {
  NetworkRunner runner(GoldenModel(GetParam()));
  const std::vector<int32_t> tokens = RandomTokens(260, runner.vocab_size(), 8);
  engine::Sequence alone = runner.NewSequence(tokens), padded = runner.NewSequence(tokens);
  NetworkRunner::Part of_alone{&alone, 250}, of_padded{&padded, 250};
  runner.Step({&of_alone, 1});
  runner.Step({&of_padded, 1});
  of_alone = {&alone, 1, /*absorbed=*/true};
  of_padded = {&padded, 1, /*absorbed=*/true};
  for (int i = 0; i < 10; ++i) {
    const std::vector<float> expected = runner.Step({&of_alone, 1});
    EXPECT_TRUE(numerics::BitEqual(runner.Step({&of_padded, 1}, /*padded_seqs=*/4), expected));
  }
  EXPECT_TRUE(runner.CacheBytes(padded) == runner.CacheBytes(alone));
}

// Blocks and slot, moved as bytes in the middle of everything, are all there is of a sequence.
TEST_P(DeepseekV4Test, ASequenceMovedToAnotherWorkerGoesOnBitForBit) {
  for (const KvCacheDtype dtype : {KvCacheDtype::kFloat32, KvCacheDtype::kFp8}) {
    NetworkRunner source(GoldenModel(GetParam()), WithCache(dtype));
    NetworkRunner target(GoldenModel(GetParam()), WithCache(dtype));
    const int32_t vocab = source.vocab_size();
    const std::vector<int32_t> tokens = RandomTokens(280, vocab, 3);
    engine::Sequence whole = source.NewSequence(tokens);
    const std::vector<float> expected = source.Run(whole, 512);
    for (const int32_t moved_at : {2, 26, 131, 256, 259}) {
      SCOPED_TRACE(testing::Message() << KvCacheDtypeName(dtype) << " moved at " << moved_at);
      engine::Sequence prefilled = source.NewSequence(absl::MakeConstSpan(tokens).first(moved_at));
      source.Run(prefilled, 512);
      engine::Sequence moved = target.Receive(source, prefilled);
      // A chunk, then decodes.
      moved.tokens.assign(tokens.begin(), tokens.begin() + moved_at + 21);
      EXPECT_TRUE(numerics::BitEqual(target.Run(moved, 512, /*absorbed_from=*/moved_at + 10),
                                     Rows(expected, moved_at, 21, vocab)));
    }
  }
}

// What a sequence before it left in a slot does not show.
TEST_P(DeepseekV4Test, AUsedSlotDoesNotShow) {
  NetworkRunner runner(GoldenModel(GetParam()));
  const std::vector<int32_t> tokens = RandomTokens(40, runner.vocab_size(), 4);
  engine::Sequence fresh = runner.NewSequence(tokens);
  const std::vector<float> expected = runner.Run(fresh, 7);
  engine::Sequence before = runner.NewSequence(RandomTokens(399, runner.vocab_size(), 5));
  runner.Run(before, 512);
  engine::Sequence after = runner.NewSequence(tokens);
  after.state_slot = before.state_slot;
  EXPECT_TRUE(numerics::BitEqual(runner.Run(after, 7), expected));
}

TEST_P(DeepseekV4Test, ARoundedCacheStaysNear) {
  NetworkRunner exact(GoldenModel(GetParam()));
  const std::vector<int32_t> tokens = RandomTokens(200, exact.vocab_size(), 6);
  engine::Sequence a = exact.NewSequence(tokens);
  const std::vector<float> expected = exact.Run(a, 512);
  double previous = 0;
  for (const KvCacheDtype dtype : {KvCacheDtype::kBfloat16, KvCacheDtype::kFp8}) {
    NetworkRunner rounded(GoldenModel(GetParam()), WithCache(dtype));
    engine::Sequence b = rounded.NewSequence(tokens);
    const std::vector<float> actual = rounded.Run(b, 512);
    double sum = 0;
    for (size_t i = 0; i < actual.size(); ++i) sum += std::abs(actual[i] - expected[i]);
    const double mean = sum / static_cast<double>(actual.size());
    EXPECT_GT(mean, previous + 1e-5) << KvCacheDtypeName(dtype);  // it is rounded indeed
    EXPECT_LT(mean, 0.2) << KvCacheDtypeName(dtype);  // by the fixtures README's fp8 table, not far
    previous = mean;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, DeepseekV4Test, ::testing::Values("v4_odd", "v4_native"),
                         [](const auto& info) { return std::string(info.param); });

TEST(DeepseekV4CreateTest, RefusesPlansForAnotherWindow) {
  const auto backend = kernels::cpu::CreateCpuBackend(1);
  NetworkOptions options = NetworkRunner::Options();
  options.block_size = 256;
  options.limits.sliding_window = 64;
  EXPECT_THAT(LoadNetwork(GoldenModel("v4_native"), options, *backend).status().ToString(),
              ::testing::HasSubstr("a sliding window of 64 tokens, the model's has 128"));
  options.limits.sliding_window = 128;
  options.block_size = 64;
  EXPECT_THAT(LoadNetwork(GoldenModel("v4_native"), options, *backend).status().ToString(),
              ::testing::HasSubstr("cache group hca cannot be laid out"));
}

}  // namespace
}  // namespace model

// Continuous batching over an engine whose text is a hash of what it was shown: every test compares
// the text with that of the request alone, and the gauges with an idle worker's.

#include "decode_worker/decode_scheduler.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "tests/decode_worker/fake_engine.h"
#include "tests/decode_worker/harness.h"

namespace decode_worker {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kBlockSize = 64;

RequestSpec Spec(const std::string& id, std::vector<int32_t> tokens, int32_t max_tokens) {
  RequestSpec spec;
  spec.id = {.request_id = id, .attempt = 1};
  spec.num_prompt_tokens = static_cast<int32_t>(tokens.size());
  spec.tokens = std::move(tokens);
  spec.sampling.temperature = 0;
  spec.sampling.max_tokens = max_tokens;
  spec.cache_namespace = "test";
  spec.local_prefill = true;
  return spec;
}

// The text of each branch as it would be if the request were alone.
void ExpectReference(const RequestSpec& spec, const RecordingSink& sink) {
  for (int32_t i = 0; i < spec.num_branches; ++i) {
    const std::vector<int32_t> expected = ReferenceTokens(spec.tokens, spec.sampling, i);
    EXPECT_EQ(sink.tokens(i), expected) << spec.id.request_id << " branch " << i;
    const bool stopped = !spec.sampling.stop_token_ids.empty() &&
                         std::count(spec.sampling.stop_token_ids.begin(),
                                    spec.sampling.stop_token_ids.end(), expected.back()) > 0;
    EXPECT_EQ(sink.finish(i), stopped ? FinishReason::kStop : FinishReason::kLength)
        << spec.id.request_id << " branch " << i;
  }
}

struct Config {
  DecodeOptions options;
  FakeEngineOptions engine;
  int32_t num_blocks = 64;
};

class DecodeSchedulerTest : public ::testing::Test {
 protected:
  void Start(const Config& config = {}) {
    auto engine = CreateFakeEngine(config.engine);
    engine_ = engine.get();
    harness_ = std::make_unique<SchedulerHarness>(config.options, std::move(engine),
                                                  Room{config.num_blocks});
  }
  std::shared_ptr<RecordingSink> Submit(const RequestSpec& spec) { return harness_->Submit(spec); }
  DecodeScheduler& scheduler() { return harness_->scheduler(); }

  FakeEngine* engine_ = nullptr;
  std::unique_ptr<SchedulerHarness> harness_;
};

TEST_F(DecodeSchedulerTest, OneRequestGivesItsReferenceText) {
  Start();
  const RequestSpec spec = Spec("r", RandomTokens(100, 1), 40);
  const auto sink = Submit(spec);
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
  EXPECT_EQ(sink->usage().computed_tokens, 100);
  EXPECT_EQ(sink->usage().output_tokens, 40);
  EXPECT_TRUE(harness_->WaitIdle());
}

// The engine's steps take 0.5 ms each.
TEST_F(DecodeSchedulerTest, APromptIsToldTheTimeOfItsChunksWithoutThatOfDecoding) {
  Start({.options = {.worker = {}, .chunk_tokens = 48}, .engine = {}, .num_blocks = 64});
  const auto alone = Submit(Spec("alone", RandomTokens(100, 1), 40));
  ASSERT_TRUE(alone->Wait().ok());
  EXPECT_DOUBLE_EQ(alone->usage().prefill_ms, 3 * 0.5);
  const auto decoding = Submit(Spec("decoding", RandomTokens(100, 2), 2000));
  decoding->WaitTokens(1);
  const auto beside = Submit(Spec("beside", RandomTokens(100, 3), 2));
  ASSERT_TRUE(beside->Wait().ok());
  EXPECT_DOUBLE_EQ(beside->usage().prefill_ms, 0);
}

TEST_F(DecodeSchedulerTest, PromptsAroundABlockAndAChunk) {
  Start({.options = {.worker = {}, .chunk_tokens = 48}, .engine = {}, .num_blocks = 64});
  for (const int32_t length : {1, 47, 48, 49, 63, 64, 65, 127, 128, 129, 300}) {
    for (const int32_t max_tokens : {1, 2, 66}) {
      const RequestSpec spec =
          Spec(absl::StrCat(length, "+", max_tokens), RandomTokens(length, 7), max_tokens);
      const auto sink = Submit(spec);
      ASSERT_TRUE(sink->Wait().ok()) << length;
      ExpectReference(spec, *sink);
    }
  }
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, StopTokenEndsTextAndItsSurplusRowIsThrownAway) {
  Start();
  RequestSpec spec = Spec("r", RandomTokens(70, 2), 500);
  spec.sampling.stop_token_ids = {3, 11};
  const auto sink = Submit(spec);
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
  ASSERT_EQ(sink->finish(), FinishReason::kStop);
  EXPECT_TRUE(harness_->WaitIdle());
  EXPECT_EQ(scheduler().snapshot().batch.surplus_rows, 1);
}

TEST_F(DecodeSchedulerTest, StopTokensAreBannedBeforeMinTokens) {
  Start();
  RequestSpec spec = Spec("r", RandomTokens(70, 2), 200);
  for (int32_t token = 0; token < 25; ++token) spec.sampling.stop_token_ids.push_back(token);
  spec.sampling.min_tokens = 60;
  const auto sink = Submit(spec);
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
  EXPECT_GE(sink->tokens().size(), 61u);
}

TEST_F(DecodeSchedulerTest, BranchesEqualSingleRequestsWithTheirBranchNumber) {
  Start();
  for (const int32_t length : {1, 63, 64, 65, 200}) {
    RequestSpec spec = Spec(absl::StrCat(length), RandomTokens(length, 3), 150);
    spec.num_branches = 5;
    spec.sampling.temperature = 1;
    spec.sampling.seed = 42;
    spec.sampling.stop_token_ids = {9};
    const auto sink = Submit(spec);
    ASSERT_TRUE(sink->Wait().ok());
    ExpectReference(spec, *sink);
    EXPECT_NE(sink->tokens(0), sink->tokens(1));
  }
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, PenaltiesSurviveBranchesAndReusedSlots) {
  Config config;
  config.engine.num_penalty_slots = 4;
  Start(config);
  std::vector<RequestSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 8; ++i) {
    RequestSpec spec =
        Spec(absl::StrCat("r", i), RandomTokens(30 + 20 * i, static_cast<uint64_t>(i)), 50 + i);
    spec.num_branches = 1 + i % 3;
    spec.sampling.temperature = 0.5;
    spec.sampling.repetition_penalty = i % 2 == 0 ? 1.0f : 1.1f;
    spec.sampling.frequency_penalty = 0.1f * static_cast<float>(i);
    specs.push_back(spec);
    sinks.push_back(Submit(spec));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok());
    ExpectReference(specs[i], *sinks[i]);
  }
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, LogprobsComeWithEveryToken) {
  Start();
  RequestSpec spec = Spec("r", RandomTokens(10, 4), 5);
  spec.sampling.num_logprobs = 2;
  const auto sink = Submit(spec);
  ASSERT_TRUE(sink->Wait().ok());
  for (const TokenUpdate& update : sink->updates()) {
    EXPECT_EQ(update.num_logprobs, 2);
    EXPECT_EQ(update.sample.logprob, -1.0f - static_cast<float>(update.sample.token_id));
  }
}

TEST_F(DecodeSchedulerTest, FollowUpTurnIsServedFromOwnBlocks) {
  Start();
  const RequestSpec first = Spec("turn1", RandomTokens(100, 5), 101);
  const auto sink = Submit(first);
  ASSERT_TRUE(sink->Wait().ok());
  std::vector<int32_t> history = first.tokens;
  const std::vector<int32_t> answer = sink->tokens();
  history.insert(history.end(), answer.begin(), answer.end());
  history.push_back(1);
  const RequestSpec second = Spec("turn2", history, 10);
  const auto follow_up = Submit(second);
  ASSERT_TRUE(follow_up->Wait().ok());
  ExpectReference(second, *follow_up);
  // Of 200 written tokens (the last sampled one is not) 3 blocks are full.
  EXPECT_EQ(follow_up->usage().cached_tokens, 3 * kBlockSize);
  EXPECT_EQ(follow_up->usage().computed_tokens, 202 - 3 * kBlockSize);
}

TEST_F(DecodeSchedulerTest, CachedPromptStillComputesItsLastToken) {
  Start();
  const RequestSpec spec = Spec("a", RandomTokens(128, 6), 3);
  ASSERT_TRUE(Submit(spec)->Wait().ok());
  RequestSpec again = spec;
  again.id.request_id = "b";
  const auto sink = Submit(again);
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(again, *sink);
  EXPECT_EQ(sink->usage().cached_tokens, 64);
}

TEST_F(DecodeSchedulerTest, OtherNamespacesShareNothing) {
  Start();
  const RequestSpec spec = Spec("a", RandomTokens(128, 6), 3);
  ASSERT_TRUE(Submit(spec)->Wait().ok());
  RequestSpec other = spec;
  other.id.request_id = "b";
  other.cache_namespace = "salted";
  const auto sink = Submit(other);
  ASSERT_TRUE(sink->Wait().ok());
  EXPECT_EQ(sink->usage().cached_tokens, 0);
}

// Long random histories: mixed lengths, branches, penalties, stops, cancels and shared prefixes.
void RunHistory(SchedulerHarness& harness, uint64_t seed, int32_t num_requests,
                int32_t max_blocks_of_request, int32_t max_branches = 4) {
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int32_t bound) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
  };
  const int32_t most_tokens = max_blocks_of_request * kBlockSize;
  const std::vector<int32_t> shared = RandomTokens(most_tokens, 99);
  struct Running {
    RequestSpec spec;
    std::shared_ptr<RecordingSink> sink;
    uint64_t submission;
    bool cancelled;
  };
  std::vector<Running> running;
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t max_tokens = 1 + below(below(3) == 0 ? 150 : 30);
    const int32_t length = 1 + below(most_tokens - max_tokens);
    std::vector<int32_t> tokens =
        below(2) == 0 ? RandomTokens(length, random())
                      : std::vector<int32_t>(shared.begin(), shared.begin() + length);
    RequestSpec spec = Spec(absl::StrCat(seed, "-", i), std::move(tokens), max_tokens);
    spec.num_branches = below(4) == 0 ? 1 + below(max_branches) : 1;
    spec.priority = below(3) - 1;
    spec.sampling.temperature = below(2) == 0 ? 0.0f : 1.0f;
    spec.sampling.seed = random();
    if (below(2) == 0) spec.sampling.stop_token_ids = {below(50), below(50)};
    if (below(3) == 0) spec.sampling.presence_penalty = 0.5f;
    if (below(3) == 0) spec.sampling.min_tokens = std::min(max_tokens, 5);
    const auto sink = harness.Submit(spec);
    running.push_back({spec, sink, harness.last_submission(), below(6) == 0});
    if (running.back().cancelled) {
      if (below(2) == 0) sink->WaitTokens(1 + below(5));
      harness.scheduler().CancelSubmission(running.back().submission, absl::CancelledError("test"));
    }
  }
  for (const Running& one : running) {
    const absl::Status status = one.sink->Wait();
    if (status.ok()) {
      ExpectReference(one.spec, *one.sink);
      continue;
    }
    EXPECT_TRUE(one.cancelled) << one.spec.id.request_id << ": " << status;
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    // What was delivered before is right too.
    for (int32_t b = 0; b < one.spec.num_branches; ++b) {
      const std::vector<int32_t> all = ReferenceTokens(one.spec.tokens, one.spec.sampling, b);
      const std::vector<int32_t> got = one.sink->tokens(b);
      ASSERT_LE(got.size(), all.size());
      EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin())) << one.spec.id.request_id;
    }
  }
  EXPECT_TRUE(harness.WaitIdle());
}

TEST_F(DecodeSchedulerTest, MixedRequestsEqualEachAlone) {
  Config config;
  config.options.chunk_tokens = 100;
  config.engine.limits.max_seqs = 12;
  config.num_blocks = 200;
  Start(config);
  for (uint64_t seed = 100; seed < 105; ++seed) RunHistory(*harness_, seed, 120, 8);
}

TEST_F(DecodeSchedulerTest, TinyPoolPreemptsAndChangesNoText) {
  Config config;
  config.options.growth_tokens = 0;
  config.engine.limits.max_seqs = 10;
  config.num_blocks = 8;
  Start(config);
  for (uint64_t seed = 200; seed < 210; ++seed) RunHistory(*harness_, seed, 120, 6);
  EXPECT_GT(scheduler().snapshot().batch.preemptions, 50);
}

// The pool is too small for all three: the lowest priority gives its blocks back, however old it
// is, and its text is as if it had not.
TEST_F(DecodeSchedulerTest, TheLowestPriorityGivesWayAndItsTextIsTheSame) {
  Config config;
  config.options.growth_tokens = 0;
  config.num_blocks = 7;
  Start(config);
  engine_->Hold();
  std::vector<RequestSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (const int32_t priority : {-1, 0, 5}) {  // the lowest is the oldest
    RequestSpec spec = Spec(absl::StrCat("p", priority), RandomTokens(120, 10 + priority), 150);
    spec.priority = priority;
    spec.sampling.temperature = 1;
    spec.sampling.seed = 3;
    specs.push_back(spec);
    sinks.push_back(Submit(spec));  // the first step waits meanwhile: all begin together
  }
  engine_->Go();
  for (size_t i = 0; i < specs.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok()) << i;
    ExpectReference(specs[i], *sinks[i]);
  }
  EXPECT_GT(sinks[0]->usage().preemptions, 0);
  EXPECT_EQ(sinks[2]->usage().preemptions, 0);
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, SmallPlansLimitEveryKindOfRow) {
  Config config;
  config.options.growth_tokens = 0;
  config.engine.limits.max_tokens = 40;
  config.engine.limits.max_absorbed_tokens = 8;
  config.engine.limits.max_seqs = 8;
  config.engine.limits.max_samples = 8;
  config.engine.limits.max_copies = 1;
  config.engine.limits.max_history_tokens = 4 * 6 * kBlockSize;
  config.num_blocks = 16;
  Start(config);
  for (uint64_t seed = 300; seed < 305; ++seed) RunHistory(*harness_, seed, 80, 6);
}

TEST_F(DecodeSchedulerTest, GrowthRoomPreventsPreemption) {
  Config config;
  config.options.growth_tokens = 512;
  config.num_blocks = 8;
  Start(config);
  // A request that comes to an idle worker is taken even if its branches will not all fit: hence
  // one branch.
  RunHistory(*harness_, 14, 100, 6, /*max_branches=*/1);
  EXPECT_EQ(scheduler().snapshot().batch.preemptions, 0);
}

TEST_F(DecodeSchedulerTest, KvEventsDescribeExactlyWhatIsIndexed) {
  Config config;
  config.options.growth_tokens = 0;
  config.num_blocks = 12;
  Start(config);
  RunHistory(*harness_, 15, 60, 6);
  absl::flat_hash_map<block_hash::BlockHash, block_hash::BlockHash> seen;
  for (const worker::KvEventLog::Frame& frame : harness_->events().Read(1)) {
    for (const engine::BlockEvent& event : frame.events) {
      if (event.stored) {
        EXPECT_TRUE(seen.emplace(event.hash, event.parent).second);
      } else {
        EXPECT_EQ(seen.erase(event.hash), 1u);
      }
    }
  }
  EXPECT_EQ(static_cast<int32_t>(seen.size()), scheduler().snapshot().blocks.cached);
}

TEST_F(DecodeSchedulerTest, SameAttemptTwiceIsRefusedAndTheFirstGoesOn) {
  Start();
  engine_->Hold();
  const RequestSpec spec = Spec("r", RandomTokens(10, 1), 5);
  const auto first = Submit(spec);
  first->WaitAccepted();
  const auto second = Submit(spec);
  engine_->Go();
  EXPECT_EQ(second->Wait().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(first->Wait().ok());
  ExpectReference(spec, *first);
}

// Also one whose client has gone: nobody waits for what comes late.
TEST_F(DecodeSchedulerTest, WhatHasEndedDoesNotRunAgain) {
  Start();
  RequestSpec spec = Spec("r", RandomTokens(10, 1), 5);
  spec.id.attempt = 2;
  ASSERT_TRUE(Submit(spec)->Wait().ok());
  EXPECT_EQ(Submit(spec)->Wait().code(), absl::StatusCode::kAlreadyExists);
  spec.id.attempt = 1;
  EXPECT_EQ(status::Reason(Submit(spec)->Wait()), status::kStaleAttempt);
  spec.id.attempt = 3;
  const auto newer = Submit(spec);
  ASSERT_TRUE(newer->Wait().ok());
  ExpectReference(spec, *newer);
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, NewerAttemptReplacesTheOlder) {
  Start();
  engine_->Hold();
  RequestSpec spec = Spec("r", RandomTokens(10, 1), 5);
  const auto first = Submit(spec);
  spec.id.attempt = 2;
  const auto second = Submit(spec);
  spec.id.attempt = 1;
  const auto stale = Submit(spec);
  engine_->Go();
  EXPECT_EQ(status::Reason(first->Wait()), status::kStaleAttempt);
  EXPECT_EQ(status::Reason(stale->Wait()), status::kStaleAttempt);
  ASSERT_TRUE(second->Wait().ok());
  ExpectReference(spec, *second);
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, FullQueueIsResourceExhausted) {
  Config config;
  config.options.worker.max_waiting = 3;
  Start(config);
  for (int i = 0; i < 3; ++i) {
    RequestSpec waits = Spec(absl::StrCat("w", i), RandomTokens(10, 1), 5);
    waits.local_prefill = false;
    Submit(waits)->WaitAccepted();
  }
  const absl::Status refused = Submit(Spec("r", RandomTokens(10, 1), 5))->Wait();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(refused), status::kQueueFull);
}

TEST_F(DecodeSchedulerTest, DeadlineEndsARequestInEveryPhase) {
  Start();
  RequestSpec waiting = Spec("waiting", RandomTokens(10, 1), 5);
  waiting.local_prefill = false;
  waiting.deadline = Clock::now() + std::chrono::milliseconds(20);
  RequestSpec running = Spec("running", RandomTokens(10, 1), 3000);
  running.deadline = Clock::now() + std::chrono::milliseconds(20);
  const auto a = Submit(waiting);
  const auto b = Submit(running);
  EXPECT_EQ(a->Wait().code(), absl::StatusCode::kDeadlineExceeded);
  const absl::Status status = b->Wait();  // 3000 steps may be done within 20 ms of a quick machine
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, CancelByNameFindsOnlyTheAttempt) {
  Start();
  engine_->Hold();
  const auto sink = Submit(Spec("r", RandomTokens(10, 1), 50));
  sink->WaitAccepted();
  EXPECT_FALSE(scheduler().Cancel({.request_id = "r", .attempt = 2}, "other attempt"));
  EXPECT_FALSE(scheduler().Cancel({.request_id = "q", .attempt = 1}, "unknown"));
  EXPECT_TRUE(scheduler().Cancel({.request_id = "r", .attempt = 1}, "no longer wanted"));
  engine_->Go();
  const absl::Status status = sink->Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no longer wanted"));
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, SlowReaderEndsItsRequestOnly) {
  Start();
  auto slow = std::make_shared<RecordingSink>();
  slow->RefuseAfter(5);
  ASSERT_TRUE(scheduler().Submit(Spec("slow", RandomTokens(10, 1), 500), slow).ok());
  const RequestSpec spec = Spec("r", RandomTokens(70, 2), 50);
  const auto sink = Submit(spec);
  EXPECT_EQ(slow->Wait().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
  EXPECT_TRUE(harness_->WaitIdle());
}

TEST_F(DecodeSchedulerTest, DrainRefusesNewWorkAndFinishesOld) {
  Start();
  engine_->Hold();
  const RequestSpec spec = Spec("r", RandomTokens(70, 2), 50);
  const auto sink = Submit(spec);
  sink->WaitAccepted();
  scheduler().StartDrain();
  EXPECT_EQ(scheduler().remaining().requests, 1);
  const absl::Status refused = Submit(Spec("late", RandomTokens(10, 1), 5))->Wait();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status::Reason(refused), status::kDraining);
  engine_->Go();
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
  EXPECT_EQ(scheduler().remaining().requests, 0);
}

TEST_F(DecodeSchedulerTest, StopEndsEveryRequestOnce) {
  Start();
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 20; ++i) {
    sinks.push_back(Submit(Spec(absl::StrCat("r", i), RandomTokens(100, 1), 3000)));
  }
  sinks[0]->WaitTokens(1);
  scheduler().Stop();
  for (const auto& sink : sinks) {
    const absl::Status status = sink->Wait();
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kUnavailable) << status;
  }
  EXPECT_EQ(scheduler().snapshot().blocks.active, 0);
}

// One request's logits are no numbers: it alone fails, in the middle of its output or at its start.
TEST_F(DecodeSchedulerTest, ARequestWithoutATokenFailsAloneAndTheOthersGoOn) {
  for (const uint32_t position : {0u, 25u}) {
    Config config;
    config.engine.poison_seed = 13;
    config.engine.poison_position = position;
    Start(config);
    std::vector<RequestSpec> specs;
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int i = 0; i < 4; ++i) {
      RequestSpec spec = Spec(absl::StrCat("r", i), RandomTokens(20, i), 100);
      spec.sampling.seed = i == 1 ? 13 : 1;
      spec.num_branches = i == 2 ? 2 : 1;
      specs.push_back(spec);
      sinks.push_back(Submit(spec));
    }
    const absl::Status failed = sinks[1]->Wait();
    EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(status::Reason(failed), status::kBadLogits);
    EXPECT_THAT(std::string(failed.message()),
                HasSubstr(absl::StrCat("logits behind token ", std::max(20u, position))));
    EXPECT_EQ(sinks[1]->tokens().size(), position == 0 ? 0 : position - 20);
    for (const int i : {0, 2, 3}) {
      ASSERT_TRUE(sinks[i]->Wait().ok()) << i;
      ExpectReference(specs[i], *sinks[i]);
    }
    EXPECT_TRUE(scheduler().health().ok());
    EXPECT_TRUE(harness_->WaitIdle());
  }
}

TEST_F(DecodeSchedulerTest, BrokenEngineEndsEverythingAsInternal) {
  Start();
  engine_->FailAfter(5);
  const auto sink = Submit(Spec("r", RandomTokens(10, 1), 500));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Submit(Spec("late", RandomTokens(10, 1), 5))->Wait().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(scheduler().health().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace decode_worker

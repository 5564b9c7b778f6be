#include "router/routing_policy.h"

#include <map>
#include <vector>

#include "gtest/gtest.h"

namespace router {
namespace {

WorkerView Prefill(WorkerSlot slot) {
  return {.slot = slot,
          .is_prefill = true,
          .block_size = 64,
          .block_bytes = 64 * 1000,
          .num_blocks = 1000,
          .prefill_tokens_per_s = 1000};
}
WorkerView Decode(WorkerSlot slot) {
  WorkerView view = Prefill(slot);
  view.is_prefill = false;
  view.can_decode = true;
  view.decode_step_ms = 10;
  view.decode_step_ms_per_seq = 1;
  return view;
}
WorkerView Both(WorkerSlot slot) {
  WorkerView view = Decode(slot);
  view.prefills_any_length = true;
  return view;
}
RequestView Request(int32_t tokens, int32_t max_tokens = 64) {
  return {.prompt_tokens = tokens, .max_tokens = max_tokens, .total_tokens = tokens + max_tokens};
}
bool NothingBlocked(int32_t, int32_t) { return false; }

class RoutingPolicyTest : public testing::Test {
 protected:
  Decision Pick(const RequestView& request, const std::vector<WorkerView>& workers) {
    return Choose(options_, request, workers, NothingBlocked, &state_);
  }
  PolicyOptions options_ = {.local_prefill_tokens = 256};
  PolicyState state_ = {.random = std::minstd_rand(1)};
};

TEST_F(RoutingPolicyTest, LongPromptsGoToAPrefillWorkerShortOnesStayAtTheDecodeWorker) {
  const std::vector<WorkerView> workers = {Prefill(0), Decode(1)};
  Decision decision = Pick(Request(257), workers);
  ASSERT_EQ(decision.feasibility, Feasibility::kNow);
  EXPECT_EQ(decision.choice.prefill, 0);
  EXPECT_EQ(decision.choice.decode, 1);
  EXPECT_EQ(decision.choice.reason, RouteReason::kRemote);
  decision = Pick(Request(256), workers);
  EXPECT_EQ(decision.choice.prefill, -1);
  EXPECT_EQ(decision.choice.reason, RouteReason::kShort);
}

TEST_F(RoutingPolicyTest, ADecodeWorkerGetsAFewMoreThanItRunsAtATime) {
  std::vector<WorkerView> workers = {Decode(0)};
  workers[0].max_seqs = 8;
  workers[0].used_blocks = 1;
  workers[0].requests = 10;  // 8, a quarter of them, and one: room for one more
  EXPECT_EQ(Pick(Request(100), workers).feasibility, Feasibility::kNow);
  workers[0].requests = 11;
  EXPECT_EQ(Pick(Request(100), workers).feasibility, Feasibility::kLater);
  workers[0].max_seqs = 0;  // not stated
  EXPECT_EQ(Pick(Request(100), workers).feasibility, Feasibility::kNow);
  workers[0] = Decode(0);
  workers[0].max_seqs = 2;
  RequestView many = Request(100);
  many.branches = 16;
  EXPECT_EQ(Pick(many, workers).feasibility, Feasibility::kNow) << "an idle one takes what it can";
}

TEST_F(RoutingPolicyTest, AWorkerThatIsSlowerThanItSaidIsThatMuchDearer) {
  WorkerView worker = Prefill(0);
  worker.prefill_s_per_token2 = 1e-7;
  worker.waiting_tokens = 300;
  const double queue_ms = PrefillQueueMs(worker);
  const double prefill_ms = PrefillMs(worker, Request(500));
  worker.prefill_slowdown = 3;
  EXPECT_DOUBLE_EQ(PrefillQueueMs(worker), 3 * queue_ms);
  EXPECT_DOUBLE_EQ(PrefillMs(worker, Request(500)), 3 * prefill_ms);

  std::vector<WorkerView> workers = {Prefill(0), Prefill(1), Decode(2)};
  workers[0].prefill_slowdown = 1.5;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Pick(Request(500), workers).choice.prefill, 1);
  workers[1].waiting_tokens = 1000;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Pick(Request(500), workers).choice.prefill, 0);
}

TEST_F(RoutingPolicyTest, TheWatermarkKeepsPartOfTheCacheFree) {
  std::vector<WorkerView> workers = {Decode(0)};
  workers[0].requests = 1;
  workers[0].used_blocks = 500;  // of 1000; the request needs 2 and 1
  options_.kv_watermark = 0.503;
  EXPECT_EQ(Pick(Request(100), workers).feasibility, Feasibility::kNow);
  options_.kv_watermark = 0.502;
  EXPECT_EQ(Pick(Request(100), workers).feasibility, Feasibility::kLater);
}

TEST_F(RoutingPolicyTest, ADecodeWorkerWithoutStateSlotsIsFullWhateverItsBlocks) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1), Decode(2)};
  workers[1].num_state_slots = workers[2].num_state_slots = 8;
  workers[1].requests = workers[1].used_state_slots = 7;
  workers[2].requests = workers[2].used_state_slots = 5;
  RequestView request = Request(1000);
  request.branches = 2;
  EXPECT_EQ(Pick(request, workers).choice.decode, 2);
  workers[2].used_state_slots = 7;
  EXPECT_EQ(Pick(request, workers).feasibility, Feasibility::kLater);
  request.branches = 1;
  EXPECT_EQ(Pick(request, workers).feasibility, Feasibility::kNow);
}

TEST_F(RoutingPolicyTest, AFollowUpTurnGoesToTheDecodeWorkerThatHasItsHistory) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1), Decode(2)};
  workers[2].cached_tokens = 960;
  workers[2].requests = 3;
  const Decision decision = Pick(Request(1100), workers);
  ASSERT_EQ(decision.feasibility, Feasibility::kNow);
  EXPECT_EQ(decision.choice.prefill, -1);
  EXPECT_EQ(decision.choice.decode, 2);
}

TEST_F(RoutingPolicyTest, ThePrefillWorkerWithThePrefixWinsUntilItsQueueCostsMore) {
  std::vector<WorkerView> workers = {Prefill(0), Prefill(1), Decode(2)};
  workers[1].cached_tokens = 640;
  EXPECT_EQ(Pick(Request(1000), workers).choice.prefill, 1);
  // 0.9 s of work against 0.64 s saved, and 0.64 s of a worker for others.
  workers[1].waiting_tokens = 900;
  EXPECT_EQ(Pick(Request(1000), workers).choice.prefill, 1);
  workers[1].waiting_tokens = 1400;
  EXPECT_EQ(Pick(Request(1000), workers).choice.prefill, 0);
}

TEST_F(RoutingPolicyTest, ALongQueueEverywhereMeansLater) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1)};
  workers[0].waiting_tokens = 3000;
  EXPECT_EQ(Pick(Request(1000), workers).feasibility, Feasibility::kLater);
}

TEST_F(RoutingPolicyTest, AFullDecodeWorkerMeansLaterAnEmptyOneTakesWhatFitsAtAll) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1)};
  workers[1].num_blocks = 20;
  EXPECT_EQ(Pick(Request(1200), workers).feasibility, Feasibility::kNow);
  workers[1].used_blocks = 5;
  workers[1].requests = 1;
  EXPECT_EQ(Pick(Request(1200), workers).feasibility, Feasibility::kLater);
  EXPECT_EQ(Pick(Request(1280), workers).feasibility, Feasibility::kNever) << "21 blocks of 20";
}

TEST_F(RoutingPolicyTest, NobodyWhoCouldMeansNever) {
  EXPECT_EQ(Pick(Request(10), {}).feasibility, Feasibility::kNever);
  EXPECT_EQ(Pick(Request(10), {Prefill(0)}).feasibility, Feasibility::kNever);
  EXPECT_EQ(Pick(Request(1000), {Decode(0)}).feasibility, Feasibility::kNever)
      << "role decode does not prefill long prompts";
  std::vector<WorkerView> workers = {Prefill(0), Decode(1)};
  EXPECT_EQ(Choose(
                options_, Request(1000), workers, [](int32_t, int32_t) { return true; }, &state_)
                .feasibility,
            Feasibility::kNever);
  workers[1].max_model_len = 1000;
  EXPECT_EQ(Pick(Request(990, 20), workers).feasibility, Feasibility::kNever);
}

TEST_F(RoutingPolicyTest, RoleBothPrefillsWhenNobodyElseCanOrWhenThatIsCheaper) {
  Decision decision = Pick(Request(1000), {Both(0)});
  ASSERT_EQ(decision.feasibility, Feasibility::kNow);
  EXPECT_EQ(decision.choice.reason, RouteReason::kNoPrefillWorker);
  std::vector<WorkerView> workers = {Prefill(0), Both(1)};
  workers[0].waiting_tokens = 1500;
  decision = Pick(Request(1000), workers);
  EXPECT_EQ(decision.choice.prefill, -1);
  EXPECT_EQ(decision.choice.reason, RouteReason::kCheaper);
  workers[0].waiting_tokens = 0;
  workers[1].requests = 4;  // whose steps a local prefill would delay
  decision = Pick(Request(1000), workers);
  EXPECT_EQ(decision.choice.prefill, 0);
}

TEST_F(RoutingPolicyTest, EqualWorkersShareAndTheLessUsedIsPreferred) {
  std::vector<WorkerView> workers = {Decode(0), Decode(1), Decode(2), Decode(3)};
  std::map<int32_t, int> counts;
  for (int i = 0; i < 4000; ++i) ++counts[Pick(Request(100), workers).choice.decode];
  for (const auto& [worker, count] : counts) EXPECT_NEAR(count, 1000, 200) << worker;
  EXPECT_EQ(counts.size(), 4u);
  workers.resize(2);
  workers[0].recent_assignments = 0.5;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Pick(Request(100), workers).choice.decode, 1);
}

TEST_F(RoutingPolicyTest, ACacheHitBreaksTiesBeforeAnythingElse) {
  std::vector<WorkerView> workers = {Prefill(0), Prefill(1), Decode(2), Decode(3)};
  for (WorkerView& worker : workers) worker.prefill_tokens_per_s = 1e6;  // 0.06 ms a block
  workers[1].cached_tokens = 64;
  workers[3].cached_tokens = 64;
  workers[1].recent_assignments = workers[3].recent_assignments = 9;
  for (int i = 0; i < 50; ++i) {
    const Decision decision = Pick(Request(500), workers);
    EXPECT_EQ(decision.choice.prefill, 1);
    EXPECT_EQ(decision.choice.decode, 3);
  }
}

TEST_F(RoutingPolicyTest, SaysWhetherOnlyThePrefillQueueIsInTheWay) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1)};
  workers[0].waiting_tokens = 3000;
  EXPECT_TRUE(Pick(Request(1000), workers).decode_has_room);
  workers[1].used_blocks = 999;
  workers[1].requests = 1;
  EXPECT_FALSE(Pick(Request(1000), workers).decode_has_room);
}

TEST_F(RoutingPolicyTest, RoundRobinAndLeastLoad) {
  options_.policy = Policy::kRoundRobin;
  std::vector<WorkerView> workers = {Decode(0), Decode(1), Decode(2)};
  std::map<int32_t, int> counts;
  for (int i = 0; i < 30; ++i) ++counts[Pick(Request(100), workers).choice.decode];
  EXPECT_EQ(counts, (std::map<int32_t, int>{{0, 10}, {1, 10}, {2, 10}}));
  options_.policy = Policy::kLeastLoad;
  workers[0].requests = 9;
  workers[1].requests = 2;
  workers[2].requests = 9;
  EXPECT_EQ(Pick(Request(100), workers).choice.decode, 1);
}

TEST_F(RoutingPolicyTest, HeldBlocksGoToADecodeWorkerWithRoom) {
  std::vector<WorkerView> workers = {Prefill(0), Decode(1), Decode(2)};
  workers[1].used_blocks = 999;
  workers[1].requests = 9;
  const Decision decision =
      ChooseDecodeForHeld(options_, Request(1000), workers, 0, NothingBlocked, &state_);
  ASSERT_EQ(decision.feasibility, Feasibility::kNow);
  EXPECT_EQ(decision.choice.decode, 2);
  EXPECT_EQ(decision.choice.prefill, 0);
  const auto misfit = [](int32_t prefill, int32_t decode) { return prefill == 0 && decode == 2; };
  EXPECT_EQ(ChooseDecodeForHeld(options_, Request(1000), workers, 0, misfit, &state_).feasibility,
            Feasibility::kLater);
}

TEST(CostTermsTest, FollowTheFormula) {
  WorkerView worker = Prefill(0);
  worker.prefill_s_per_token2 = 1e-6;
  worker.cached_tokens = 64;
  // u = 936: 0.936 s linear, and 1e-6 * 936 * (1000 + 64) / 2 = 0.497952 s of attention.
  EXPECT_NEAR(PrefillMs(worker, Request(1000)), 936 + 497.952, 1e-6);
  EXPECT_EQ(BlocksFor(0, 64), 0);
  EXPECT_EQ(BlocksFor(64, 64), 1);
  EXPECT_EQ(BlocksFor(65, 64), 2);
}

}  // namespace
}  // namespace router

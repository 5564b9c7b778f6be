// Edges between a prefill and a decode worker: cancels, deaths and cuts at every stage of a
// transfer, full pools, leases, repeated calls, and clocks that jump.

#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "tests/chaos/edge_fixture.h"

namespace chaos {
namespace {

using integration::WorkerProcess;

bool IsReceiving(const ferry::v1::LoadReport& load) { return load.kv_blocks().reserved() > 0; }
bool IsDecoding(const ferry::v1::LoadReport& load) { return load.running_requests() > 0; }

class HeldTest : public EdgeTest {
 protected:
  // `prefill` has exchanged addresses with every decode worker.
  void MeetAll(const WorkerProcess& prefill) {
    double num_decode = 0;
    for (const WorkerProcess* worker : system().Living()) {
      if (worker->binary == "ferry-decode") ++num_decode;
    }
    uint32_t salt = 200;
    EXPECT_TRUE(WaitUntil([&] {
      std::vector<Asked> asked;
      for (int i = 0; i < 4; ++i) asked.push_back(Later(Ask(100, ++salt, 4)));
      for (Asked& one : asked) one.get();
      return Metric(prefill, "ferry_handshake_total{result=\"ok\"}") >= num_decode;
    }));
  }
  // Asks, and when a decode worker has accepted it nobody reaches that any more.  `prefill` starts
  // only then.
  Asked AskAndSilence(WorkerProcess& prefill, const Question& question, WorkerProcess** busy) {
    computed_before_ = Metric(prefill, "ferry_prompt_tokens_total{source=\"computed\"}");
    prefill.process.Signal(SIGSTOP);
    Asked asked = Later(question);
    *busy = BusyDecode([](const ferry::v1::LoadReport& load) {
      return load.waiting_requests() + load.running_requests() > 0;
    });
    EXPECT_NE(*busy, nullptr);
    if (*busy != nullptr) stage_->relay(**busy).SetSilent(true);
    prefill.process.Signal(SIGCONT);
    return asked;
  }

  double computed_before_ = 0;
};

TEST_F(EdgeTest, E05_ACancelWhilePrefillingStopsBothSides) {
  Start(Workers(1, 1));
  std::atomic<bool> leave = false;
  Asked asked = Later(LongPrompt(1), {.leave = &leave});
  ASSERT_NE(FindBusyPrefill(system(), 1), nullptr);
  leave = true;
  EXPECT_EQ(asked.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(
      WaitUntil([&] { return Metric(system().prefill(0), "ferry_requests_running") == 0; }));
}

TEST_F(EdgeTest, E06_ACancelDuringTheHandoffLeavesNoBlockBehind) {
  Start(Workers(1, 1));
  for (uint32_t i = 0; i < 3; ++i) {
    std::atomic<bool> leave = false;
    Asked asked = Later(LongPrompt(2 + i), {.leave = &leave});
    ASSERT_NE(BusyDecode(IsReceiving), nullptr);
    leave = true;
    EXPECT_EQ(asked.get().status.code(), absl::StatusCode::kCancelled);
    ExpectPromisesKept();
  }
  stage_->AskAll({LongPrompt(2)});
}

TEST_F(EdgeTest, E07_ACancelWhileDecodingFreesTheBlocks) {
  Start(Workers(1, 1));
  std::atomic<bool> leave = false;
  Asked asked = Later(LongOutput(5), {.leave = &leave});
  ASSERT_NE(BusyDecode(IsDecoding), nullptr);
  leave = true;
  EXPECT_EQ(asked.get().status.code(), absl::StatusCode::kCancelled);
}

TEST_F(EdgeTest, E08_ACancelThatRacesWithTheEndHasOneWinner) {
  Start(Workers(1, 1));
  const Question question = Ask(60, 6, 6);
  for (int messages = 0; messages < 24; ++messages) {
    stage_->observer().Ask(question, {.leaves_after = messages % 8});
  }
}

TEST_F(EdgeTest, E10_APrefillWorkerThatDiesBeforeItComputesIsReplaced) {
  Start(Workers(2, 1));
  for (int i = 0; i < 2; ++i) system().prefill(i).process.Signal(SIGSTOP);
  Asked asked = Later(Ask(500, 7, 8));
  ASSERT_TRUE(WaitUntil([&] {
    return Metric(system().decode(0), "ferry_requests_waiting") +
               Metric(system().decode(0), "ferry_requests_running") >
           0;
  }));
  system().ExpectDead(system().prefill(0).process);
  system().prefill(0).process.Kill();
  system().prefill(1).process.Signal(SIGCONT);
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.summary.prefill_worker(), system().prefill(1).front);
}

TEST_F(EdgeTest, E11_APrefillWorkerThatDiesInMidPushIsReplaced) {
  Start(Workers(2, 1));
  Asked asked = Later(LongPrompt(8));
  ASSERT_NE(BusyDecode(IsReceiving), nullptr);
  WorkerProcess* const busy = FindBusyPrefill(system(), 2, nullptr);
  ASSERT_NE(busy, nullptr);
  system().ExpectDead(busy->process);
  busy->process.Kill();
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.summary.attempts(), 2u);
}

TEST_F(EdgeTest, E12_ATransferThatBreaksWithBothAliveIsMadeAgain) {
  Start(Workers(1, 1));
  Asked asked = Later(LongPrompt(9));
  ASSERT_NE(BusyDecode(IsReceiving), nullptr);
  // Calls go by the relay; what is cut is the way of the cache alone.
  stage_->network().Cut("prefill0", "decode0");
  EXPECT_TRUE(WaitUntil([&] {
    return Metric(system().decode(0), "ferry_transfer_failures_total") +
               Metric(system().prefill(0), "ferry_transfer_failures_total") >
           0;
  }));
  EXPECT_EQ(stage_->Repair(), "");
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
}

// A decode worker that does not answer the reservation: the blocks are held and pushed to another.
TEST_F(HeldTest, E13_BlocksThatFindNoPlaceAreHeldAndPushedToAnotherDecodeWorker) {
  Start(Workers(1, 2));
  WorkerProcess& prefill = system().prefill(0);
  MeetAll(prefill);
  WorkerProcess* busy = nullptr;
  Asked asked = AskAndSilence(prefill, Ask(500, 40, 8), &busy);
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_NE(outcome.summary.decode_worker(), busy->front);
  // The prompt was computed once.
  EXPECT_EQ(Metric(prefill, "ferry_prompt_tokens_total{source=\"computed\"}"),
            computed_before_ + 500);
  EXPECT_EQ(stage_->Repair(), "");
}

TEST_F(EdgeTest, E14_ADecodeWorkerThatDiesBeforeTheFirstTokenIsReplaced) {
  Start(Workers(1, 2));
  Asked asked = Later(LongPrompt(10));
  WorkerProcess* const busy = BusyDecode(IsReceiving);
  ASSERT_NE(busy, nullptr);
  system().ExpectDead(busy->process);
  busy->process.Kill();
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.summary.attempts(), 2u);
}

TEST_F(EdgeTest, E15_AnOutputGoesOnWhenItsDecodeWorkerDies) {
  Start(Workers(1, 2));
  const Question question = LongOutput(11);
  WorkerProcess& first = system().decode(0);
  WorkerProcess& second = system().decode(1);
  // The first one it must be, and it dies when the client has twenty tokens.
  second.process.Signal(SIGSTOP);
  ASSERT_TRUE(WaitUntil([&] {
    const auto models = system().client().ListModels();
    return models.ok() && models->size() == 1 && models->front().ready_decode_workers() == 1;
  }));
  system().ExpectDead(first.process);
  const Outcome outcome = Later(question, {.on_tokens =
                                               [&](size_t num_tokens) {
                                                 if (num_tokens < 20) return;
                                                 first.process.Signal(SIGKILL);
                                                 second.process.Signal(SIGCONT);
                                               }})
                              .get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.summary.migrations(), 1u);
}

TEST_F(EdgeTest, E16_BranchesThatOutgrowThePoolTakeTurns) {
  StageOptions options = Workers(1, 1);
  options.decode_flags = {"--num_blocks", "15"};
  Start(options);
  const Question question = MakeQuestion(oracle(), {Prompt(200, 60), 250, 7}, /*num_branches=*/4);
  const Outcome outcome = stage_->observer().Ask(question, {});
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_GT(Metric(system().decode(0), "ferry_preemptions_total"), 0);
}

// The router that renews leases stands still until one has run out.
TEST_F(HeldTest, E17_AnExpiredLeaseIsPrefilledAgain) {
  Start(Workers(1, 1));
  WorkerProcess& prefill = system().prefill(0);
  MeetAll(prefill);
  WorkerProcess* busy = nullptr;
  Asked asked = AskAndSilence(prefill, Ask(500, 80, 8), &busy);
  ASSERT_TRUE(WaitUntil([&] { return Metric(prefill, "ferry_leases") > 0; }));
  system().router().Signal(SIGSTOP);
  EXPECT_TRUE(WaitUntil([&] { return Metric(prefill, "ferry_lease_expired_total") > 0; }));
  system().router().Signal(SIGCONT);
  EXPECT_EQ(stage_->Repair(), "");
  const Outcome outcome = asked.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
}

// Every request and every other call arrives twice, and calls overtake each other, under load.
TEST_F(EdgeTest, E22_RepeatedAndReorderedCallsChangeNothing) {
  StageOptions options = Workers(2, 2);
  options.meddle = true;
  Start(options);
  std::vector<Question> questions;
  for (uint32_t i = 0; i < 12; ++i) {
    questions.push_back(Ask(50 + 90 * static_cast<int32_t>(i), 100 + i, 40));
  }
  stage_->Busy(questions, 6, 1);
  stage_->Let(100, absl::Seconds(20));
  stage_->Calm();
  stage_->AskAll(questions);
  EXPECT_GT(stage_->num_repeated(), 20);
}

// An hour forward, an hour back: of the wall clock alone, of every process.
TEST_F(EdgeTest, E24_JumpsOfTheWallClockChangeNothing) {
  const std::string clock = integration::MakeTestDir() + "/clock";
  const auto set_clock = [&](const std::string& offset) {
    std::ofstream(clock + ".tmp") << offset << "\n";
    std::filesystem::rename(clock + ".tmp", clock);
  };
  set_clock("+0");
  StageOptions options = Workers(1, 1);
  options.wrap = [&](const std::string&) {
    return std::vector<std::string>{
        "env",
        "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
        "ASAN_OPTIONS=verify_asan_link_order=0",
        "FAKETIME_CACHE_DURATION=1",
        "FAKETIME_TIMESTAMP_FILE=" + clock};
  };
  Start(options);
  const Question long_output = LongOutput(13);
  uint32_t salt = 300;
  for (const char* jump : {"+3600", "-3600", "+0"}) {
    const Question long_prompt = LongPrompt(++salt);
    Asked prefilling = Later(long_prompt);
    Asked decoding = Later(long_output);
    ASSERT_NE(BusyDecode(IsDecoding), nullptr);
    set_clock(jump);
    // The processes learn of a jump within a second, and clocks that reckon between two looks at it
    // follow within two.
    for (const absl::Time end = absl::Now() + absl::Seconds(4); absl::Now() < end;) {
      const Outcome outcome = Later(Ask(150, ++salt, 2)).get();
      EXPECT_TRUE(outcome.status.ok()) << jump << ": " << outcome.status;
      EXPECT_EQ(outcome.summary.attempts(), 1u) << jump;
    }
    for (Asked* asked : {&prefilling, &decoding}) {
      const Outcome outcome = asked->get();
      EXPECT_TRUE(outcome.status.ok()) << jump << ": " << outcome.status;
      EXPECT_EQ(outcome.summary.attempts(), 1u) << jump;
      EXPECT_EQ(outcome.summary.migrations(), 0u) << jump;
      EXPECT_LT(outcome.summary.total_ms(), 60e3) << jump;
    }
    EXPECT_EQ(system().WaitUntilReady(absl::Seconds(20)), "") << jump;
    ExpectPromisesKept();
  }
}

}  // namespace
}  // namespace chaos

// One fault after another while clients keep two prefill and two decode workers busy, and after
// each the four promises: every request ended once and in time, with the oracle's text or an error
// that it had a right to, and everything that was in use has returned.

#include <cstdio>
#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/chaos/faults.h"
#include "tests/chaos/report.h"
#include "tests/integration/single_engine.h"

namespace chaos {
namespace {

constexpr int kNumClients = 6;
constexpr absl::Duration kReturnLimit = absl::Seconds(60);

class FaultsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    StageOptions options;
    options.model_dir = std::getenv("FERRY_DEMO_MODEL");
    integration::SingleEngine oracle(options.model_dir);
    questions_ = new std::vector<Question>(MixedQuestions(oracle));
    stage_ = new Stage(options);
    // As warm as it gets.
    stage_->Busy(*questions_, 2 * kNumClients, 0);
    stage_->Let(100, absl::Seconds(60));
    stage_->Calm();
    EXPECT_EQ(stage_->system().WaitUntilIdle(kReturnLimit), "");
    gauges_ = new Gauges(stage_->system());
    ExpectPromisesKept("no fault", 0);
  }
  static void TearDownTestSuite() {
    delete gauges_;
    delete stage_;
    delete questions_;
  }

  // Of the requests since the last time.
  static void ExpectPromisesKept(const std::string& fault, int64_t injected) {
    const Tally tally = stage_->observer().Take();
    for (const std::string& what : tally.faults_found) ADD_FAILURE() << fault << ": " << what;
    EXPECT_EQ(tally.lost + tally.wrong + tally.late, 0) << fault;
    EXPECT_GT(tally.requests, 0) << fault;
    EXPECT_EQ(gauges_->WaitUntilBack(kReturnLimit), "") << fault;
    std::printf("%s: %ld requests, worst %s, beyond a deadline %s\n", fault.c_str(),
                static_cast<long>(tally.requests), absl::FormatDuration(tally.longest).c_str(),
                absl::FormatDuration(tally.worst_overrun).c_str());
    if (injected > 0) Report("faults", fault, injected, Seed(), tally);
  }

  static uint64_t Seed() { return static_cast<uint64_t>(FromEnvironment("FERRY_CHAOS_SEED", 1)); }

  static std::vector<Question>* questions_;
  static Stage* stage_;
  static Gauges* gauges_;
};

std::vector<Question>* FaultsTest::questions_ = nullptr;
Stage* FaultsTest::stage_ = nullptr;
Gauges* FaultsTest::gauges_ = nullptr;

// A fault, repaired, and the promises; `times` of them.
TEST_F(FaultsTest, OneAtATimeBreaksNoPromise) {
  std::mt19937_64 random(Seed());
  std::vector<Fault> faults = AllFaults();
  std::shuffle(faults.begin(), faults.end(), random);
  const auto limit = absl::Now() + absl::Seconds(FromEnvironment("FERRY_CHAOS_SECONDS", 1000));
  for (const Fault& fault : faults) {
    if (absl::Now() >= limit) break;
    SCOPED_TRACE(fault.name);
    stage_->Busy(*questions_, kNumClients, random());
    stage_->Let(10, absl::Seconds(20));
    fault.inject(*stage_, random);
    EXPECT_EQ(stage_->Repair(), "");
    stage_->Calm();
    stage_->AskAll({questions_->begin(), questions_->begin() + 4});
    ExpectPromisesKept(fault.name, 1);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace chaos

// A storm: faults follow each other without a rest while clients ask; each is repaired before the
// next, but what it has broken need not have healed.  One worker of each kind is always there, so
// no request is lost.  When the storm is over everything is where it was.

#include <cstdio>
#include <cstdlib>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/chaos/faults.h"
#include "tests/chaos/report.h"

namespace chaos {
namespace {

constexpr int kNumClients = 6;
constexpr absl::Duration kReturnLimit = absl::Seconds(60);

class StormTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Links, StormTest, testing::Values("tcp", "shm"),
                         [](const auto& param_info) { return std::string(param_info.param); });

TEST_P(StormTest, EveryRequestEndsOnceAndRightAndEverythingReturns) {
  const auto seed = static_cast<uint64_t>(FromEnvironment("FERRY_CHAOS_SEED", 1));
  StageOptions options;
  options.model_dir = std::getenv("FERRY_DEMO_MODEL");
  options.links = GetParam();
  integration::SingleEngine oracle(options.model_dir);
  const std::vector<Question> questions = MixedQuestions(oracle);
  Stage stage(options);
  stage.Busy(questions, 2 * kNumClients, 0);  // as warm as it gets
  stage.Let(100, absl::Seconds(60));
  stage.Calm();
  ASSERT_EQ(stage.system().WaitUntilIdle(kReturnLimit), "");
  Gauges gauges(stage.system());

  std::mt19937_64 random(seed);
  const absl::Time end = absl::Now() + absl::Seconds(FromEnvironment("FERRY_CHAOS_SECONDS", 60));
  stage.Busy(questions, kNumClients, random());
  int64_t num_faults = 0;
  Tally tally;
  while (absl::Now() < end && !HasFailure()) {
    const Fault& fault = AllFaults()[random() % AllFaults().size()];
    std::printf("%s\n", fault.name.c_str());
    fault.inject(stage, random);
    ++num_faults;
    tally.Add(stage.observer().Take());
    stage.Let(static_cast<int64_t>(random() % 40), absl::Seconds(2));
  }
  EXPECT_EQ(stage.Repair(), "");
  stage.Calm();
  stage.AskAll(questions);
  tally.Add(stage.observer().Take());
  for (const std::string& what : tally.faults_found) ADD_FAILURE() << what;
  EXPECT_EQ(tally.lost + tally.wrong + tally.late, 0);
  EXPECT_GT(tally.endings["OK"], 0);
  EXPECT_EQ(gauges.WaitUntilBack(kReturnLimit), "");
  Report("storm", std::string("a storm over ") + GetParam(), num_faults, seed, tally);
}

}  // namespace
}  // namespace chaos

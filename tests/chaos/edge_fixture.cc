#include "tests/chaos/edge_fixture.h"

#include <cstdlib>

#include "absl/time/clock.h"
#include "client/ferry_client.h"
#include "gtest/gtest.h"

namespace chaos {

using integration::FerrySystem;
using integration::WorkerProcess;

namespace {

constexpr absl::Duration kReturnLimit = absl::Seconds(60);
constexpr absl::Duration kWaitLimit = absl::Seconds(60);

}  // namespace

StageOptions EdgeTest::Workers(int num_prefill, int num_decode) {
  StageOptions options;
  options.model_dir = std::getenv("FERRY_LONG_MODEL");
  options.num_prefill = num_prefill;
  options.num_decode = num_decode;
  options.prefill_flags = options.decode_flags = {"--num_blocks", "100"};
  return options;
}

void EdgeTest::Start(const StageOptions& options) {
  stage_ = std::make_unique<Stage>(options);
  gauges_ = std::make_unique<Gauges>(system());
}

void EdgeTest::ExpectPromisesKept() {
  const Tally tally = stage_->observer().Take();
  for (const std::string& what : tally.faults_found) ADD_FAILURE() << what;
  EXPECT_EQ(tally.lost + tally.wrong + tally.late, 0);
  EXPECT_EQ(system().WaitUntilIdle(kReturnLimit), "");
  tally_.Add(tally);
}

void EdgeTest::TearDown() {
  if (stage_ == nullptr) return;
  ExpectPromisesKept();
  const char* const name = testing::UnitTest::GetInstance()->current_test_info()->name();
  if (!HasFailure()) Report("edges", name, 1, 0, tally_);
  stage_.reset();
}

Question EdgeTest::Ask(int32_t prompt_tokens, uint32_t salt, int32_t max_tokens) {
  return MakeQuestion(oracle(), {Prompt(prompt_tokens, salt), max_tokens, salt % 3});
}

EdgeTest::Asked EdgeTest::Later(const Question& question, const Manner& manner) {
  return std::async(std::launch::async,
                    [this, question, manner] { return stage_->observer().Ask(question, manner); });
}

absl::Status EdgeTest::Say(const ferry::v1::GenerateRequest& request, absl::Duration timeout) {
  return system().NewClient(timeout)->Generate(request, [](const auto&) { return true; });
}

double EdgeTest::Metric(const WorkerProcess& worker, const std::string& name) {
  return integration::SumOf(integration::ReadMetrics(worker.metrics_port, worker.ip), name)
      .value_or(0);
}

double EdgeTest::RouterMetric(const std::string& name) {
  return integration::SumOf(
             integration::ReadMetrics(system().router_metrics_port(), system().router_ip()), name)
      .value_or(0);
}

bool EdgeTest::WaitUntil(const std::function<bool()>& done) {
  const absl::Time limit = absl::Now() + kWaitLimit;
  while (!done()) {
    if (absl::Now() > limit) return false;
    system().LetReportsPass(1);
  }
  return true;
}

WorkerProcess* EdgeTest::BusyDecode(const LoadCondition& load) {
  std::vector<WorkerProcess*> workers;
  for (WorkerProcess* worker : system().Living()) {
    if (worker->binary == "ferry-decode") workers.push_back(worker);
  }
  return FindBusy(workers, load);
}

}  // namespace chaos

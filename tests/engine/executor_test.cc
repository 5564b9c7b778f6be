#include "engine/executor.h"

#include <atomic>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/engine/recording_backend.h"

namespace engine {
namespace {

// A network whose sample i is "the previous step's sample i, plus one", or the row's token id.
class CountingNetwork final : public model::Network {
 public:
  CountingNetwork() : layout_(Spec()) { config_.vocab_size = 10; }

  const model::ModelConfig& config() const override { return config_; }
  const model::CacheLayout& cache_layout() const override { return layout_; }
  const std::string& weights_digest() const override { return digest_; }
  int64_t weight_bytes() const override { return 0; }
  int64_t skipped_tensors() const override { return 0; }
  int32_t max_model_len() const override { return 128; }
  absl::Status Forward(const kernels::LaunchContext&, const model::StepPlan& plan,
                       const model::StepState& state, const model::StepOutput& output) override {
    if (gate != nullptr) gate->WaitForNotification();
    ++num_forward;
    if (fail) return absl::InternalError("device lost");
    for (int32_t i = 0; i < plan.counts().num_samples; ++i) {
      const int32_t row = plan.samples[i].row;
      const int32_t source = plan.token_source[row];
      output.sampled_ids[i] =
          1 + (source >= 0 ? state.previous_sampled[source] : plan.token_ids[row]);
      output.results[i].token_id = output.sampled_ids[i];
    }
    return absl::OkStatus();
  }

  absl::Notification* gate = nullptr;
  std::atomic<bool> fail = false;
  int32_t num_forward = 0;

 private:
  static model::CacheSpec Spec() {
    model::CacheSpec spec;
    spec.groups.push_back({.name = "latent", .layers = 1, .entry_bytes = 16});
    return spec;
  }
  model::ModelConfig config_;
  model::CacheLayout layout_;
  std::string digest_ = "none";
};

class ExecutorTest : public testing::Test {
 protected:
  void SetUp() override {
    auto network = std::make_unique<CountingNetwork>();
    network_ = network.get();
    model::StepLimits limits;
    limits.max_tokens = 4;
    limits.max_seqs = 2;
    limits.max_samples = 2;
    auto executor = Executor::Create(kernels::cpu::CreateCpuBackend(1), std::move(network), limits,
                                     /*num_penalty_slots=*/1);
    ASSERT_TRUE(executor.ok()) << executor.status();
    engine_ = *std::move(executor);
    cache_.resize(engine_->cache_layout().block_bytes() * 4);
    engine_->SetCache(absl::MakeSpan(cache_), {});
    for (auto& plan : plans_) plan = std::make_unique<model::StepPlan>(limits);
  }

  // A plan of one row that samples once; the row's token is `token`, or the previous step's sample.
  const model::StepPlan& Plan(int64_t step, int32_t token) {
    model::StepPlan& plan = *plans_[step % 2];
    plan.Clear();
    plan.counts().num_tokens = plan.counts().num_samples = 1;
    plan.token_ids[0] = token;
    plan.token_source[0] = token >= 0 ? -1 : 0;
    plan.samples[0].row = 0;
    return plan;
  }

  CountingNetwork* network_ = nullptr;
  std::vector<std::byte> cache_;
  std::unique_ptr<model::StepPlan> plans_[2];
  std::unique_ptr<Executor> engine_;  // last: its thread may still run a step on the others
};

TEST_F(ExecutorTest, AStepIsLaunchedBeforeThePreviousOneIsCollected) {
  absl::Notification gate;
  network_->gate = &gate;
  StepHandle first = *engine_->Launch(Plan(0, 40));
  StepHandle second = *engine_->Launch(Plan(1, -1));  // before any step has run
  gate.Notify();
  EXPECT_EQ(engine_->Collect(first)->samples[0].token_id, 41);
  const StepHandle third = *engine_->Launch(Plan(2, -1));
  EXPECT_EQ(engine_->Collect(second)->samples[0].token_id, 42);
  EXPECT_EQ(engine_->Collect(third)->samples[0].token_id, 43);
}

TEST_F(ExecutorTest, AFailedStepBreaksTheEngine) {
  network_->fail = true;
  const StepHandle handle = *engine_->Launch(Plan(0, 1));
  EXPECT_EQ(engine_->Collect(handle).status().message(), "device lost");
  network_->fail = false;
  EXPECT_EQ(engine_->Launch(Plan(1, 1)).status().message(), "device lost");
}

TEST_F(ExecutorTest, ALaunchedStepMayBeAbandoned) {
  ASSERT_TRUE(engine_->Launch(Plan(0, 1)).ok());
  engine_.reset();  // joins the executor thread
}

TEST_F(ExecutorTest, MoreThanTwoStepsInFlightAreABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ASSERT_TRUE(engine_->Launch(Plan(0, 1)).ok());
  ASSERT_TRUE(engine_->Launch(Plan(1, 1)).ok());
  EXPECT_DEATH((void)engine_->Launch(Plan(0, 1)), "in flight: 2");
}

// On a device with memory of its own.
class RecordingExecutorTest : public testing::Test {
 protected:
  RecordingExecutorTest() {
    limits_.max_tokens = 4;
    limits_.max_seqs = limits_.max_samples = 2;
    auto backend = std::make_unique<RecordingBackend>();
    backend_ = backend.get();
    backend_->on_replay = [] { return absl::OkStatus(); };
    auto network = std::make_unique<CountingNetwork>();
    network_ = network.get();
    engine_ = *Executor::Create(std::move(backend), std::move(network), limits_, 1);
    cache_.resize(engine_->cache_layout().block_bytes() * 4);
    engine_->SetCache(absl::MakeSpan(cache_), {});
    for (auto& plan : plans_) plan = std::make_unique<model::StepPlan>(limits_);
  }

  // Runs a decode step of `num_seqs` sequences, or one that also copies a block.
  void Step(int32_t num_seqs, bool copies = false) {
    model::StepPlan& plan = *plans_[step_ % 2];
    plan.Clear();
    model::StepCounts& counts = plan.counts();
    counts.num_tokens = counts.num_seqs = counts.num_samples = num_seqs;
    counts.num_absorbed_tokens = counts.num_absorbed_seqs = counts.num_splits = num_seqs;
    counts.num_copies = copies ? 1 : 0;
    for (int32_t i = 0; i < num_seqs; ++i) {
      plan.cu_seqlens_q[i + 1] = plan.cu_seqlens_kv[i + 1] = i + 1;
      plan.token_source[i] = -1;
      plan.samples[i].row = i;
    }
    ++step_;
    const StepHandle handle = *engine_->Launch(plan);
    ASSERT_TRUE(engine_->Collect(handle).ok());
  }

  model::StepLimits limits_;
  RecordingBackend* backend_ = nullptr;
  CountingNetwork* network_ = nullptr;
  std::vector<std::byte> cache_;
  std::unique_ptr<model::StepPlan> plans_[2];
  int64_t step_ = 0;
  std::unique_ptr<Executor> engine_;
};

TEST_F(RecordingExecutorTest, AShapeIsRunThenRecordedThenReplayedInEachLane) {
  for (int32_t i = 0; i < 2; ++i) Step(1);  // one in each lane
  EXPECT_EQ(network_->num_forward, 2);
  EXPECT_EQ(backend_->num_recorded, 0);
  for (int32_t i = 0; i < 6; ++i) Step(1);
  EXPECT_EQ(network_->num_forward, 2);
  EXPECT_EQ(backend_->num_recorded, 2);
  EXPECT_EQ(backend_->num_replayed, 6);
  for (int32_t i = 0; i < 2; ++i) Step(2);  // another shape
  EXPECT_EQ(network_->num_forward, 4);
  EXPECT_EQ(backend_->num_recorded, 2);
}

TEST_F(RecordingExecutorTest, StepsOfNoShapeAreNeverRecorded) {
  for (int32_t i = 0; i < 6; ++i) Step(1, /*copies=*/true);
  EXPECT_EQ(network_->num_forward, 6);
  EXPECT_EQ(backend_->num_recorded, 0);
}

TEST_F(RecordingExecutorTest, AFailedReplayBreaksTheEngine) {
  backend_->on_replay = [] { return absl::InternalError("device lost"); };
  for (int32_t i = 0; i < 2; ++i) Step(1);
  const StepHandle handle = *engine_->Launch(*plans_[0]);
  EXPECT_EQ(engine_->Collect(handle).status().message(), "device lost");
}

}  // namespace
}  // namespace engine

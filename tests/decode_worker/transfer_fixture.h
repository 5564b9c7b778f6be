// DecodeTransferTest: a scheduler, and a prefill side that pushes blocks to it over a loopback
// link.

#ifndef TESTS_DECODE_WORKER_TRANSFER_FIXTURE_H_
#define TESTS_DECODE_WORKER_TRANSFER_FIXTURE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "decode_worker/decode_scheduler.h"
#include "gtest/gtest.h"
#include "tests/decode_worker/fake_engine.h"
#include "tests/decode_worker/harness.h"

namespace decode_worker {

class DecodeTransferTest : public ::testing::Test {
 protected:
  static constexpr int32_t kBlockSize = 64;

  // No transfer stalls, however slow the machine, but where a test wants it (kStall).
  DecodeTransferTest() { options_.worker.chunk_stall = kPatience; }

  void Start(int32_t num_blocks = 64) {
    FakeEngineOptions fake;
    fake.limits.max_tokens = 1024;
    auto engine = CreateFakeEngine(fake);
    engine_ = engine.get();
    harness_ = std::make_unique<SchedulerHarness>(options_, std::move(engine), Room{num_blocks});
    prefill_ = std::make_unique<FakePrefill>(CreateFakeEngine(fake), Room{64}, harness_->network());
    prefill_->Connect(harness_->runtime());
  }
  void TearDown() override {
    if (!HasFailure()) {
      EXPECT_TRUE(harness_->WaitIdle());
    }
    prefill_.reset();
    harness_.reset();
  }

  RequestSpec Spec(const std::string& id, int32_t length, int32_t max_tokens) {
    RequestSpec spec;
    spec.id = {.request_id = id, .attempt = 1};
    spec.tokens = RandomTokens(length, static_cast<uint64_t>(length));
    spec.num_prompt_tokens = length;
    spec.sampling.temperature = 0;
    spec.sampling.max_tokens = max_tokens;
    spec.cache_namespace = "test";
    spec.prefill_epoch = prefill_->epoch();
    return spec;
  }
  DecodeScheduler& scheduler() { return harness_->scheduler(); }
  const kv_transfer::Epoch& decode_epoch() { return harness_->runtime().epoch; }

  ReserveCall CallFor(const RequestSpec& spec, absl::Duration wait = absl::ZeroDuration()) {
    return {.request = spec.id,
            .sender = prefill_->epoch(),
            .num_tokens = static_cast<int32_t>(spec.tokens.size()),
            .wait = wait};
  }
  ConfirmCall Announcement(const RequestSpec& spec, const ReserveGrant& grant,
                           std::vector<FirstToken> first_tokens) {
    return {
        .request = spec.id,
        .transfer_id = grant.transfer_id,
        .sender = prefill_->epoch(),
        .num_blocks = grant.num_blocks,
        .num_bytes = static_cast<uint64_t>(grant.num_blocks * prefill_->runtime().block_bytes()),
        .first_tokens = std::move(first_tokens)};
  }
  // The whole of P's part.
  absl::Status Push(const RequestSpec& spec, absl::Duration wait = absl::ZeroDuration()) {
    std::vector<FirstToken> first = prefill_->Compute(spec);
    const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec, wait));
    if (!grant.ok()) return grant.status();
    last_grant_ = *grant;
    prefill_->SendAll(decode_epoch(), grant->transfer_id, spec.id.attempt,
                      grant->cached_tokens / kBlockSize);
    return ConfirmAndWait(scheduler(), Announcement(spec, *grant, std::move(first)));
  }
  void ExpectReference(const RequestSpec& spec, const RecordingSink& sink) {
    for (int32_t i = 0; i < spec.num_branches; ++i) {
      EXPECT_EQ(sink.tokens(i), ReferenceTokens(spec.tokens, spec.sampling, i))
          << spec.id.request_id << " branch " << i;
    }
  }
  bool WaitFor(const std::function<bool(const DecodeScheduler::Snapshot&)>& wanted) {
    return scheduler().WaitForSnapshot(wanted, kPatience);
  }

  DecodeOptions options_;
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<SchedulerHarness> harness_;
  std::unique_ptr<FakePrefill> prefill_;
  ReserveGrant last_grant_;
};

}  // namespace decode_worker

#endif  // TESTS_DECODE_WORKER_TRANSFER_FIXTURE_H_

#include "tests/decode_worker/harness.h"

#include <cstring>
#include <future>
#include <random>
#include <utility>

#include "engine/cache_memory.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "gtest/gtest.h"
#include "kv_transfer/ucx_transport.h"
#include "prometheus/registry.h"
#include "status/check.h"

namespace decode_worker {

std::unique_ptr<worker::WorkerRuntime> MakeRuntime(
    std::unique_ptr<engine::Engine> engine, const Room& room,
    const std::shared_ptr<kv_transfer::LoopbackNetwork>& network) {
  auto runtime = std::make_unique<worker::WorkerRuntime>();
  runtime->model_name = "test-model";
  runtime->layout_fingerprint = std::string(16, 'f');
  runtime->epoch = kv_transfer::Epoch::Random();
  runtime->engine = std::move(engine);
  const bool keeps_state = runtime->state_slot_bytes() > 0;
  const worker::CacheSize size = {.num_blocks = room.num_blocks + 1,
                                  .num_state_slots = keeps_state ? room.num_state_slots + 1 : 0,
                                  .snapshot_blocks = keeps_state ? room.snapshot_blocks : 0};
  FERRY_CHECK(worker::MapCache(size, *runtime).ok()) << room.num_blocks;
  std::memset(runtime->token_blocks->data(), 0xff, runtime->token_blocks->span().size());
  for (int32_t slot = 1; slot <= room.num_state_slots && keeps_state; ++slot) {
    std::memset(runtime->state_slot(slot).data(), 0xff, runtime->state_slot(slot).size());
  }
  runtime->hasher = std::make_unique<block_hash::BlockHasher>(0);
  if (network != nullptr) {
    runtime->transport = kv_transfer::CreateLoopbackTransport(network, runtime->epoch);
  } else {
    kv_transfer::UcxOptions ucx;
    ucx.epoch = runtime->epoch;
    ucx.listen_ip = "127.0.0.1";
    runtime->transport = *kv_transfer::CreateUcxTransport(ucx);
  }
  FERRY_CHECK(worker::RegisterCache(*runtime).ok()) << "register";
  return runtime;
}

std::vector<int32_t> RandomTokens(int32_t count, uint64_t seed, int32_t vocab_size) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
  }
  return tokens;
}

void RecordingSink::OnAccepted(int32_t) {
  {
    std::lock_guard lock(mutex_);
    accepted_ = true;
  }
  changed_.notify_all();
}

bool RecordingSink::OnToken(const TokenUpdate& update) {
  {
    std::lock_guard lock(mutex_);
    if (refuse_after_ >= 0 && static_cast<int32_t>(updates_.size()) >= refuse_after_) return false;
    updates_.push_back(update);
  }
  changed_.notify_all();
  return true;
}

void RecordingSink::OnEnd(const absl::Status& status, const RequestUsage& usage) {
  {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(end_.has_value()) << "a request ends once";
    end_ = status;
    usage_ = usage;
  }
  changed_.notify_all();
}

absl::Status RecordingSink::Wait() {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience),
                         [this] { return end_.has_value(); })) {
    ADD_FAILURE() << "the request did not end";
    return absl::UnknownError("did not end");
  }
  return *end_;
}

void RecordingSink::WaitAccepted() {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience),
                                [this] { return accepted_ || end_.has_value(); }));
}

void RecordingSink::WaitTokens(int32_t count) {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience), [&] {
    return static_cast<int32_t>(updates_.size()) >= count || end_.has_value();
  }));
}

std::vector<int32_t> RecordingSink::tokens(int32_t branch) const {
  std::lock_guard lock(mutex_);
  std::vector<int32_t> tokens;
  for (const TokenUpdate& update : updates_) {
    if (update.branch == branch) tokens.push_back(update.sample.token_id);
  }
  return tokens;
}

FinishReason RecordingSink::finish(int32_t branch) const {
  std::lock_guard lock(mutex_);
  FinishReason reason = FinishReason::kNone;
  for (const TokenUpdate& update : updates_) {
    if (update.branch == branch) reason = update.finish_reason;
  }
  return reason;
}

std::vector<TokenUpdate> RecordingSink::updates() const {
  std::lock_guard lock(mutex_);
  return updates_;
}

RequestUsage RecordingSink::usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

SchedulerHarness::SchedulerHarness(DecodeOptions options, std::unique_ptr<engine::Engine> engine,
                                   const Room& room, bool ucx)
    : network_(ucx ? nullptr : kv_transfer::CreateLoopbackNetwork()),
      runtime_(MakeRuntime(std::move(engine), room, network_)) {
  metrics_ =
      std::make_unique<worker::WorkerMetrics>(std::make_shared<prometheus::Registry>(), *runtime_);
  incoming_ = kv_transfer::CreateIncomingTransfers(runtime_->epoch, runtime_->transport.get());
  scheduler_ = std::make_unique<DecodeScheduler>(options, runtime_.get(), incoming_.get(), &events_,
                                                 metrics_.get(), [this](const AbortNotice& notice) {
                                                   std::lock_guard lock(mutex_);
                                                   notices_.push_back(notice);
                                                 });
  scheduler_->Start();
}

SchedulerHarness::~SchedulerHarness() {
  scheduler_->Stop();
  runtime_->transport->Close();
  incoming_.reset();
}

std::vector<AbortNotice> SchedulerHarness::notices() const {
  std::lock_guard lock(mutex_);
  return notices_;
}

std::shared_ptr<RecordingSink> SchedulerHarness::Submit(RequestSpec spec) {
  auto sink = std::make_shared<RecordingSink>();
  const absl::StatusOr<uint64_t> submitted = scheduler_->Submit(std::move(spec), sink);
  if (submitted.ok()) {
    last_submission_ = *submitted;
  } else {
    sink->OnEnd(submitted.status(), {});
  }
  return sink;
}

bool SchedulerHarness::WaitIdle() {
  const int32_t num_blocks = runtime_->pool->num_blocks() - 1;
  return scheduler_->WaitForSnapshot(
      [&](const DecodeScheduler::Snapshot& now) {
        return now.running_requests == 0 && now.waiting_requests == 0 && now.blocks.active == 0 &&
               now.blocks.reserved == 0 && now.blocks.quarantined == 0 &&
               now.blocks.free + now.blocks.cached == num_blocks &&
               now.state_slots.free + now.state_slots.cached == runtime_->num_state_slots();
      },
      kPatience);
}

// A prefill worker receives no bytes.
class FakePrefill::RefusingSink final : public kv_transfer::ReceiveSink {
 public:
  absl::StatusOr<absl::Span<std::byte>> OnOffer(const kv_transfer::Epoch&,
                                                const kv_transfer::MessageHeader&) override {
    return absl::FailedPreconditionError("nothing is expected here");
  }
  void OnReceived(const kv_transfer::Epoch&, const kv_transfer::MessageHeader&,
                  absl::Status) override {}
  void OnPeerLost(const kv_transfer::Epoch&, absl::Status) override {}
};

FakePrefill::FakePrefill(std::unique_ptr<engine::Engine> engine, const Room& room,
                         const std::shared_ptr<kv_transfer::LoopbackNetwork>& network)
    : sink_(std::make_unique<RefusingSink>()),
      runtime_(MakeRuntime(std::move(engine), room, network)) {
  runtime_->transport->SetSink(sink_.get());
}

FakePrefill::~FakePrefill() { runtime_->transport->Close(); }

void FakePrefill::Connect(worker::WorkerRuntime& decode) {
  // In the order of a handshake: the decode worker first.
  const absl::Status back =
      decode.transport->Connect(epoch(), runtime_->transport->addresses(), kPatience);
  EXPECT_TRUE(back.ok()) << back;
  const absl::Status connected =
      runtime_->transport->Connect(decode.epoch, decode.transport->addresses(), kPatience);
  EXPECT_TRUE(connected.ok()) << connected;
}

std::vector<FirstToken> FakePrefill::Compute(const RequestSpec& spec) {
  engine::ReleaseBlocks(computed_, *runtime_->pool);
  std::vector<engine::Sequence> branches(static_cast<size_t>(spec.num_branches));
  for (size_t i = 0; i < branches.size(); ++i) {
    branches[i].tokens = spec.tokens;
    branches[i].num_prompt_tokens = spec.num_prompt_tokens;
    branches[i].sampling = spec.sampling;
    branches[i].sampling.branch = static_cast<uint32_t>(i);
    if (spec.sampling.HasPenalties()) {
      branches[i].penalty_slot = static_cast<int32_t>(i);
      branches[i].penalty_reset_needed = true;
    }
  }
  const auto num_tokens = static_cast<int32_t>(spec.tokens.size());
  EXPECT_TRUE(engine::TakePrefix(branches[0], {}, 0, engine::Continuation::kComputed,
                                 runtime_->block_size(), *runtime_->pool)
                  .ok());
  EXPECT_TRUE(
      engine::GrowBlocks(branches[0], num_tokens, runtime_->block_size(), *runtime_->pool).ok());
  model::StepPlan plan(runtime_->engine->limits());
  engine::PlanBuilder builder(runtime_->block_size(), plan);
  builder.Begin(next_step_id_++);
  builder.Add(branches[0], num_tokens, /*absorbed=*/false, /*sample=*/true);
  for (size_t i = 1; i < branches.size(); ++i) builder.AddBranchSample(branches[i]);
  const absl::StatusOr<engine::StepHandle> handle = runtime_->engine->Launch(plan);
  EXPECT_TRUE(handle.ok()) << handle.status();
  const absl::StatusOr<engine::StepResult> result = runtime_->engine->Collect(*handle);
  EXPECT_TRUE(result.ok()) << result.status();
  std::vector<FirstToken> tokens;
  for (int32_t i = 0; i < spec.num_branches; ++i) {
    tokens.push_back({.branch = i, .sample = result->samples[static_cast<size_t>(i)]});
  }
  computed_ = std::move(branches[0]);
  return tokens;
}

std::shared_ptr<kv_transfer::OutgoingTransfer> FakePrefill::Send(const kv_transfer::Epoch& receiver,
                                                                 const kv_transfer::TransferId& id,
                                                                 uint32_t attempt, int32_t first,
                                                                 int32_t count) {
  std::shared_ptr<kv_transfer::OutgoingTransfer> outgoing =
      kv_transfer::StartOutgoingTransfer(runtime_->transport.get(), receiver, id, attempt);
  const std::vector<engine::BlockId>& blocks = computed_.blocks;
  const int32_t end = count < 0 ? static_cast<int32_t>(blocks.size()) : first + count;
  for (int32_t i = first; i < end; ++i) {
    outgoing->SendBlock(static_cast<uint32_t>(i - first),
                        runtime_->block(blocks.at(static_cast<size_t>(i))));
  }
  if (count < 0 && computed_.state_slot != engine::kNoSlot) {
    outgoing->SendStateSlot(runtime_->state_slot(computed_.state_slot));
  }
  return outgoing;
}

kv_transfer::OutgoingResult FakePrefill::SendAll(const kv_transfer::Epoch& receiver,
                                                 const kv_transfer::TransferId& id,
                                                 uint32_t attempt, int32_t first) {
  auto promise = std::make_shared<std::promise<kv_transfer::OutgoingResult>>();
  std::future<kv_transfer::OutgoingResult> sent = promise->get_future();
  Send(receiver, id, attempt, first)->Finish([promise](kv_transfer::OutgoingResult result) {
    promise->set_value(std::move(result));
  });
  if (sent.wait_for(absl::ToChronoNanoseconds(kPatience)) != std::future_status::ready) {
    ADD_FAILURE() << "sends did not complete";
    return {};
  }
  return sent.get();
}

absl::StatusOr<ReserveGrant> ReserveAndWait(DecodeScheduler& scheduler, ReserveCall call) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<ReserveGrant>>>();
  auto grant = promise->get_future();
  scheduler.Reserve(std::move(call), [promise](const absl::StatusOr<ReserveGrant>& result) {
    promise->set_value(result);
  });
  return grant.get();
}

absl::Status ConfirmAndWait(DecodeScheduler& scheduler, ConfirmCall call) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  auto status = promise->get_future();
  scheduler.ConfirmTransfer(std::move(call),
                            [promise](const absl::Status& result) { promise->set_value(result); });
  return status.get();
}

}  // namespace decode_worker

// What a prefill worker does when all goes well: bytes that arrive are those of a local
// computation.

#include <future>
#include <random>

#include "prefill_fixture.h"

namespace prefill_worker {
namespace {

using ferry::v1::PrefillEvent;

class PrefillWorkerTest : public PrefillFixture {
 protected:
  void SetUp() override {
    StartWorker(TestOptions());
    decode_ = NewDecode();
  }
  engine::SamplingOptions Greedy() const {
    engine::SamplingOptions sampling;
    sampling.temperature = 0;
    return sampling;
  }
  std::unique_ptr<FakeDecodeWorker> decode_;
  LocalEngine local_{*engine::Engine::Create(TestOptions().worker.engine)};
};

TEST_F(PrefillWorkerTest, BlocksAndFirstTokenAreThoseOfALocalComputation) {
  const std::vector<uint32_t> tokens =
      Tokens(300, 1);  // four chunks, five blocks, the last partial
  PrefillCall call(stub_.get(), Request("a", tokens, *decode_));
  EXPECT_EQ(call.Next().event_case(), PrefillEvent::kAccepted);
  const PrefillEvent started = call.Next();
  ASSERT_EQ(started.event_case(), PrefillEvent::kStarted);
  EXPECT_EQ(started.started().cached_tokens(), 0u);
  const PrefillEvent done = call.Next();
  ASSERT_EQ(done.event_case(), PrefillEvent::kDone);
  EXPECT_TRUE(call.Finish().ok());
  EXPECT_EQ(done.done().computed_tokens(), 300u);
  EXPECT_EQ(done.done().kv_blocks(), 5u);
  EXPECT_EQ(done.done().kv_bytes(), 5u * runtime_->block_bytes());
  EXPECT_FALSE(done.done().transport().empty());
  EXPECT_GT(done.done().compute_ms(), 0);
  EXPECT_GT(done.done().prefill_ms(), 0);

  const auto truth = local_.Compute(tokens, Greedy());
  const auto received = decode_->received("a");
  ASSERT_NE(received, nullptr);
  ExpectSameRows(local_.layout(), truth, *received);
  ASSERT_EQ(received->done.first_tokens_size(), 1);
  EXPECT_EQ(received->done.first_tokens(0).token_id(),
            static_cast<uint32_t>(truth.sample.token_id));
  EXPECT_FALSE(received->done.first_tokens(0).has_logprobs());
  EXPECT_EQ(decode_->handshakes, 1);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillWorkerTest, ASecondRequestWithTheSamePrefixComputesAndSendsOnlyTheRest) {
  const std::vector<uint32_t> first = Tokens(200, 1);
  Prefill(Request("a", first, *decode_));
  EXPECT_EQ(events_.last_seq() > 0, true);

  std::vector<uint32_t> second(first.begin(), first.begin() + 192);
  for (uint32_t i = 0; i < 50; ++i) second.push_back(i % kVocab);
  decode_->cached_blocks = 2;
  const ferry::v1::PrefillDone done = Prefill(Request("b", second, *decode_));
  EXPECT_EQ(done.cached_tokens(), 192u);
  EXPECT_EQ(done.computed_tokens(), 50u);
  EXPECT_EQ(done.kv_blocks(), 2u);  // the third from P's cache, the fourth computed
  const auto truth = local_.Compute(second, Greedy());
  ExpectSameRows(local_.layout(), truth, *decode_->received("b"));
  EXPECT_EQ(decode_->received("b")->done.first_tokens(0).token_id(),
            static_cast<uint32_t>(truth.sample.token_id));

  // The same prompt again: at least its last token is computed.
  const ferry::v1::PrefillDone again = Prefill(Request("c", first, *decode_));
  EXPECT_EQ(again.cached_tokens(), 192u);
  EXPECT_EQ(again.computed_tokens(), 8u);
  // Another namespace shares nothing.
  ferry::v1::PrefillRequest other = Request("d", first, *decode_);
  other.mutable_spec()->set_cache_namespace("other");
  EXPECT_EQ(Prefill(other).cached_tokens(), 0u);
  EXPECT_EQ(decode_->handshakes, 1);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillWorkerTest, APromptOfWholeBlocksThatTheDecodeWorkerHasMovesNothing) {
  const std::vector<uint32_t> tokens = Tokens(128, 1);
  decode_->cached_blocks = 2;
  const ferry::v1::PrefillDone done = Prefill(Request("a", tokens, *decode_));
  EXPECT_EQ(done.kv_blocks(), 0u);
  EXPECT_EQ(done.kv_bytes(), 0u);
  EXPECT_EQ(decode_->received("a")->done.first_tokens(0).token_id(),
            static_cast<uint32_t>(local_.Compute(tokens, Greedy()).sample.token_id));
}

TEST_F(PrefillWorkerTest, TheTraceOfARequestGoesOnToTheDecodeWorker) {
  const std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  PrefillCall call(stub_.get(), Request("a", Tokens(100, 1), *decode_), trace);
  call.Until(ferry::v1::PrefillEvent::kDone);
  EXPECT_TRUE(call.Finish().ok());
  EXPECT_THAT(decode_->traceparents(), testing::ElementsAre(trace, trace));
  Prefill(Request("b", Tokens(100, 2), *decode_));
  EXPECT_THAT(decode_->traceparents(), testing::ElementsAre(trace, trace, "", ""));
}

TEST_F(PrefillWorkerTest, ManyAtOnceOfMixedLengthsAllArriveWhole) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<std::vector<uint32_t>> prompts = {Tokens(1, 1), Tokens(63, 2), Tokens(64, 3),
                                                Tokens(65, 4), Tokens(64, 3)};
  while (prompts.size() < 24) prompts.push_back(Tokens(1 + random() % 400, random() % 3));
  std::vector<std::unique_ptr<PrefillCall>> calls;
  for (size_t i = 0; i < prompts.size(); ++i) {
    calls.push_back(std::make_unique<PrefillCall>(
        stub_.get(), Request("r" + std::to_string(i), prompts[i], *decode_)));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "request " << i << " of " << prompts[i].size());
    calls[i]->Until(PrefillEvent::kDone);
    EXPECT_TRUE(calls[i]->Finish().ok());
    const auto truth = local_.Compute(prompts[i], Greedy());
    const auto received = decode_->received("r" + std::to_string(i));
    ExpectSameRows(local_.layout(), truth, *received);
    EXPECT_EQ(received->done.first_tokens(0).token_id(),
              static_cast<uint32_t>(truth.sample.token_id));
  }
  ExpectEverythingGivenBack();
}

TEST_F(PrefillWorkerTest, EveryBranchHasItsOwnFirstTokenAndLogprobs) {
  const std::vector<uint32_t> tokens = Tokens(100, 5);
  ferry::v1::PrefillRequest request = Request("a", tokens, *decode_);
  auto* sampling = request.mutable_spec()->mutable_sampling();
  sampling->set_temperature(1.5f);
  sampling->set_seed(11);
  sampling->set_n(6);
  sampling->set_num_logprobs(3);
  Prefill(request);
  const auto& done = decode_->received("a")->done;
  ASSERT_EQ(done.first_tokens_size(), 6);
  for (int i = 0; i < 6; ++i) {
    engine::SamplingOptions options;
    options.temperature = 1.5f;
    options.seed = 11;
    options.branch = static_cast<uint32_t>(i);
    options.num_logprobs = 3;
    const auto truth = local_.Compute(tokens, options);
    EXPECT_EQ(done.first_tokens(i).branch(), static_cast<uint32_t>(i));
    EXPECT_EQ(done.first_tokens(i).token_id(), static_cast<uint32_t>(truth.sample.token_id));
    const auto& logprobs = done.first_tokens(i).logprobs();
    EXPECT_FLOAT_EQ(logprobs.chosen().logprob(), truth.sample.logprob);
    ASSERT_EQ(logprobs.top_size(), 3);
    EXPECT_EQ(logprobs.top(0).token_id(), static_cast<uint32_t>(truth.sample.top_ids[0]));
  }
}

TEST_F(PrefillWorkerTest, GetInfoTellsWhatTheRouterNeeds) {
  grpc::ClientContext context;
  ferry::v1::WorkerInfo info;
  ASSERT_TRUE(worker_stub_->GetInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.role(), ferry::v1::WORKER_ROLE_PREFILL);
  EXPECT_EQ(info.state(), ferry::v1::WORKER_STATE_SERVING);
  EXPECT_EQ(info.epoch(), runtime_->epoch.ToBytes());
  EXPECT_EQ(info.num_blocks(), 40u);
  EXPECT_EQ(info.vocab_size(), static_cast<uint32_t>(kVocab));
  EXPECT_TRUE(info.cancel_during_transfer());
}

// A worker that takes itself for slow computes the whole prompt before it asks for room.
TEST_F(PrefillFixture, ASlowWorkerReservesWhenAllIsComputed) {
  PrefillOptions options = TestOptions();
  options.worker.transfer_total = absl::Nanoseconds(1);  // no rest of a prompt fits this
  speed_.prefill_tokens_per_s = 1000;
  StartWorker(options);
  runtime_->options.transfer_total = absl::Seconds(20);  // what the sender waits for confirmation
  auto decode = NewDecode();
  uint64_t waiting_tokens = 0;
  decode->on_reserve = [&] { waiting_tokens = Load().waiting_tokens(); };
  EXPECT_EQ(Prefill(Request("a", Tokens(300, 1), *decode)).kv_blocks(), 5u);
  EXPECT_LE(waiting_tokens, 96u);  // of 300; the last chunk may not have been counted yet
  ExpectEverythingGivenBack();
}

// Branches that fit neither the penalty slots nor the samples of one step.
TEST_F(PrefillFixture, BranchesWithPenaltiesTakeTurnsWhenSlotsAreFew) {
  PrefillOptions options = TestOptions();
  options.worker.engine.num_penalty_slots = 2;
  StartWorker(options);
  auto decode = NewDecode();
  LocalEngine local(*engine::Engine::Create(TestOptions().worker.engine));
  std::vector<std::unique_ptr<PrefillCall>> calls;
  const std::vector<uint32_t> lengths = {128, 100};  // the last row ends a full block, or does not
  for (const uint32_t length : lengths) {
    ferry::v1::PrefillRequest request =
        Request("r" + std::to_string(length), Tokens(length, 5), *decode);
    auto* sampling = request.mutable_spec()->mutable_sampling();
    sampling->set_temperature(2);
    sampling->set_seed(3);
    sampling->set_n(5);
    sampling->set_repetition_penalty(1.3f);
    calls.push_back(std::make_unique<PrefillCall>(stub_.get(), request));
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    calls[i]->Until(PrefillEvent::kDone);
    EXPECT_TRUE(calls[i]->Finish().ok());
    const auto received = decode->received("r" + std::to_string(lengths[i]));
    ASSERT_EQ(received->done.first_tokens_size(), 5);
    for (int branch = 0; branch < 5; ++branch) {
      engine::SamplingOptions sampling;
      sampling.temperature = 2;
      sampling.seed = 3;
      sampling.branch = static_cast<uint32_t>(branch);
      sampling.repetition_penalty = 1.3f;
      const auto truth = local.Compute(Tokens(lengths[i], 5), sampling);
      EXPECT_EQ(received->done.first_tokens(branch).branch(), static_cast<uint32_t>(branch));
      EXPECT_EQ(received->done.first_tokens(branch).token_id(),
                static_cast<uint32_t>(truth.sample.token_id));
      ExpectSameRows(local.layout(), truth, *received);
    }
  }
  ExpectEverythingGivenBack();
}

TEST_F(PrefillWorkerTest, BadRequestsAreRefusedWithTheirValues) {
  struct Case {
    std::function<void(ferry::v1::PrefillRequest&)> change;
    absl::StatusCode code;
    std::string message;
    std::string reason;
  };
  const Case cases[] = {
      {[](auto& r) { r.mutable_spec()->add_token_ids(kVocab); }, absl::StatusCode::kInvalidArgument,
       "token id 320 at position 10", ""},
      {[](auto& r) { r.mutable_spec()->clear_token_ids(); }, absl::StatusCode::kInvalidArgument,
       "no tokens", ""},
      {[](auto& r) {
         for (int i = 0; i < 2048; ++i) r.mutable_spec()->add_token_ids(1);
       },
       absl::StatusCode::kInvalidArgument, "prompt of 2058 tokens leaves no room", ""},
      {[](auto& r) { r.set_worker_epoch("older"); }, absl::StatusCode::kFailedPrecondition,
       "restarted", status::kStaleEpoch},
      {[](auto& r) { r.mutable_decode()->set_epoch("x"); }, absl::StatusCode::kInvalidArgument,
       "decode.epoch", ""},
      {[](auto& r) { r.mutable_decode()->clear_address(); }, absl::StatusCode::kInvalidArgument,
       "decode.address", ""},
      {[](auto& r) { r.mutable_spec()->set_model("other"); }, absl::StatusCode::kNotFound, "other",
       ""},
  };
  for (const Case& c : cases) {
    ferry::v1::PrefillRequest request = Request("bad", Tokens(10, 1), *decode_);
    c.change(request);
    const absl::Status status = PrefillCall(stub_.get(), request).Finish();
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(c.message));
    EXPECT_EQ(status::Reason(status), c.reason);
  }
  EXPECT_EQ(decode_->handshakes, 0);
  ExpectEverythingGivenBack();
}

}  // namespace
}  // namespace prefill_worker

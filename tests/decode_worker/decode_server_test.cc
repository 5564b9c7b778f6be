// A decode worker's streams over gRPC: what they carry, what is refused, and how they end.

#include <atomic>
#include <cmath>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "tests/decode_worker/server_fixture.h"

namespace decode_worker {
namespace {

using ::testing::HasSubstr;

TEST_F(DecodeServerTest, StreamsAcceptedTokensDone) {
  Start();
  DecodeRequest request = Request("r", 100, 30);
  request.mutable_spec()->mutable_sampling()->set_n(2);
  request.mutable_spec()->mutable_sampling()->set_temperature(1);
  request.mutable_spec()->mutable_sampling()->set_num_logprobs(3);
  const Answer answer = Run(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_TRUE(answer.accepted_first);
  for (uint32_t branch = 0; branch < 2; ++branch) {
    EXPECT_EQ(answer.tokens.at(branch), Reference(request, static_cast<int32_t>(branch)));
    EXPECT_EQ(answer.finish.at(branch), ferry::v1::FINISH_REASON_LENGTH);
  }
  ASSERT_EQ(answer.logprobs.size(), 60u);
  EXPECT_EQ(answer.logprobs[0].top_size(), 3);
  ASSERT_TRUE(answer.done.has_value());
  EXPECT_EQ(answer.done->computed_tokens(), 100u);
  EXPECT_EQ(answer.done->cached_tokens(), 0u);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, BadRequestsAreRefusedWithTheirValues) {
  Start(/*num_blocks=*/8);
  struct Case {
    std::function<void(DecodeRequest&)> spoil;
    grpc::StatusCode code;
    std::string words;
  };
  const auto sampling = [](DecodeRequest& request) {
    return request.mutable_spec()->mutable_sampling();
  };
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const std::vector<Case> cases = {
      {[](auto& r) { r.mutable_spec()->clear_token_ids(); }, kInvalid, "no tokens"},
      {[](auto& r) { r.mutable_spec()->set_token_ids(3, 50); }, kInvalid, "50"},
      {[](auto& r) { r.mutable_spec()->set_num_prompt_tokens(11); }, kInvalid, "11 of 10"},
      {[](auto& r) { r.mutable_spec()->mutable_key()->clear_request_id(); }, kInvalid,
       "request_id"},
      {[](auto& r) { r.mutable_spec()->mutable_key()->set_request_id(std::string(161, 'x')); },
       kInvalid, "161"},
      {[](auto& r) { r.mutable_spec()->set_model("other"); }, grpc::StatusCode::NOT_FOUND, "other"},
      {[](auto& r) { r.set_worker_epoch(std::string(16, 'e')); },
       grpc::StatusCode::FAILED_PRECONDITION, "epoch"},
      {[](auto& r) { r.set_local_prefill(false); }, kInvalid, "prefill.epoch"},
      {[&](auto& r) { sampling(r)->set_n(0); }, kInvalid, "n is 0"},
      {[&](auto& r) { sampling(r)->set_n(17); }, kInvalid, "17"},
      {[&](auto& r) { sampling(r)->set_max_tokens(0); }, kInvalid, "max_tokens is 0"},
      {[&](auto& r) { sampling(r)->set_max_tokens(4087); }, kInvalid, "4096"},
      {[&](auto& r) { sampling(r)->set_max_tokens(600); }, kInvalid, "this worker has 8"},
      {[&](auto& r) { sampling(r)->set_min_tokens(6); }, kInvalid, "min_tokens is 6"},
      {[&](auto& r) { sampling(r)->set_temperature(-1); }, kInvalid, "-1"},
      {[&](auto& r) { sampling(r)->set_temperature(std::nanf("")); }, kInvalid, "nan"},
      {[&](auto& r) { sampling(r)->set_top_k(-1); }, kInvalid, "top_k"},
      {[&](auto& r) { sampling(r)->set_top_p(0); }, kInvalid, "top_p"},
      {[&](auto& r) { sampling(r)->set_top_p(1.5f); }, kInvalid, "1.5"},
      {[&](auto& r) { sampling(r)->set_min_p(-0.5f); }, kInvalid, "min_p"},
      {[&](auto& r) { sampling(r)->set_repetition_penalty(0); }, kInvalid, "repetition_penalty"},
      {[&](auto& r) { sampling(r)->set_num_logprobs(21); }, kInvalid, "21"},
      {[&](auto& r) { sampling(r)->add_stop_token_ids(50); }, kInvalid, "50"},
      {[&](auto& r) {
         for (int i = 0; i < 73; ++i) sampling(r)->add_stop_token_ids(1);
       },
       kInvalid, "73"},
      {[&](auto& r) {
         r.mutable_spec()->set_num_prompt_tokens(5);
         sampling(r)->set_max_tokens(5);
       },
       kInvalid, "5 tokens are emitted already"},
      {[&](auto& r) {
         r.mutable_spec()->set_num_prompt_tokens(5);
         sampling(r)->set_max_tokens(50);
         sampling(r)->set_n(2);
       },
       kInvalid, "only n = 1"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("case ", i));
    DecodeRequest request = Request("r", 10, 5);
    cases[i].spoil(request);
    const Answer answer = Run(request);
    EXPECT_EQ(answer.status.error_code(), cases[i].code) << answer.status.error_message();
    EXPECT_THAT(answer.status.error_message(), HasSubstr(cases[i].words));
    EXPECT_FALSE(answer.accepted_first);
  }
  EXPECT_TRUE(Run(Request("r", 10, 5)).status.ok());
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, MigratedRequestContinuesItsText) {
  Start();
  const DecodeRequest whole = Request("whole", 100, 40);
  const std::vector<int32_t> text = Reference(whole);
  DecodeRequest rest = Request("rest", 100, 40);
  for (int i = 0; i < 15; ++i) rest.mutable_spec()->add_token_ids(static_cast<uint32_t>(text[i]));
  const Answer answer = Run(rest);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.tokens.at(0), std::vector<int32_t>(text.begin() + 15, text.end()));
}

TEST_F(DecodeServerTest, BreakingTheStreamAtAnyTimeGivesEverythingBack) {
  Start();
  for (const int32_t events : {0, 1, 2, 10}) {
    grpc::ClientContext context;
    const auto reader = decode_->Decode(&context, Request(absl::StrCat("r", events), 100, 3900));
    DecodeEvent event;
    for (int32_t i = 0; i < events; ++i) ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    while (reader->Read(&event)) {
    }
    reader->Finish();
    EXPECT_TRUE(WaitIdle()) << events;
  }
}

TEST_F(DecodeServerTest, StreamThatNobodyReadsIsBounded) {
  Start(/*num_blocks=*/1024);
  DecodeRequest request = Request("r", 10, 4000);
  request.mutable_spec()->mutable_sampling()->set_n(16);
  request.mutable_spec()->mutable_sampling()->set_num_logprobs(20);
  grpc::ClientContext context;
  const auto reader = decode_->Decode(&context, request);
  reader->WaitForInitialMetadata();
  EXPECT_TRUE(server_->scheduler().WaitForSnapshot(
      [](const auto& now) { return now.batch.steps > 0; }, kPatience));
  EXPECT_TRUE(WaitIdle());  // without a single read
  DecodeEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(DecodeServerTest, ManyStreamsLocalAndRemote) {
  Start();
  StartPrefill();
  constexpr int32_t kThreads = 12;
  constexpr int32_t kPerThread = 8;
  std::mutex prefill_mutex;  // guards prefill_, one prompt at a time
  std::vector<std::thread> threads;
  std::atomic<int32_t> right = 0;
  for (int32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int32_t i = 0; i < kPerThread; ++i) {
        const std::string id = absl::StrCat("r", t, "-", i);
        const int32_t length = 1 + (37 * t + 91 * i) % 500;
        const bool remote = (t + i) % 2 == 0;
        const DecodeRequest request =
            remote ? RemoteRequest(id, length, 40 + i) : Request(id, length, 40 + i);
        grpc::ClientContext context;
        std::future<grpc::Status> pushed;
        const Answer answer = Read(context, request, [&] {
          if (!remote) return;
          pushed = std::async(std::launch::async, [&] {
            std::lock_guard lock(prefill_mutex);
            return Push(request);
          });
        });
        EXPECT_TRUE(answer.status.ok()) << id << ": " << answer.status.error_message();
        right += answer.status.ok() && answer.tokens.at(0) == Reference(request);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kPerThread);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, InfoSaysRoleAndState) {
  options_.role_both = true;
  Start(/*num_blocks=*/32);
  const auto info = [&] {
    grpc::ClientContext context;
    ferry::v1::WorkerInfo info;
    EXPECT_TRUE(worker_->GetInfo(&context, {}, &info).ok());
    return info;
  };
  EXPECT_EQ(info().role(), ferry::v1::WORKER_ROLE_BOTH);
  EXPECT_EQ(info().state(), ferry::v1::WORKER_STATE_SERVING);
  EXPECT_EQ(info().num_blocks(), 32u);
  EXPECT_EQ(info().max_model_len(), 2048u) << "the pool holds less than the model could";
  EXPECT_TRUE(Run(Request("all", 10, 2038)).status.ok());
  EXPECT_TRUE(info().cancel_during_transfer());
  server_->StartDrain();
  EXPECT_EQ(info().state(), ferry::v1::WORKER_STATE_DRAINING);
  const Answer refused = Run(Request("late", 10, 5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status::Reason(status::FromGrpc(refused.status)), status::kDraining);
  EXPECT_TRUE(server_->drained());
}

TEST_F(DecodeServerTest, StopEndsOpenStreamsAndTransfers) {
  Start();
  StartPrefill();
  const DecodeRequest remote = RemoteRequest("remote", 200, 30);
  std::promise<void> reserved;
  std::future<Answer> waiting = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    return Read(context, remote, [&] {
      ferry::v1::ReserveResponse grant;
      EXPECT_TRUE(Reserve(remote, &grant).ok());
      reserved.set_value();
    });
  });
  std::promise<void> started;
  std::future<Answer> running = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    return Read(context, Request("running", 100, 3900), [&] { started.set_value(); });
  });
  reserved.get_future().wait();
  started.get_future().wait();
  server_->Stop();
  EXPECT_EQ(waiting.get().status.error_code(), grpc::StatusCode::UNAVAILABLE);
  const grpc::Status status = running.get().status;  // it may have been quick
  EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace decode_worker

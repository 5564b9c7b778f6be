// Prompts whose decode worker had no room: the prefill worker holds the blocks, another decode
// worker gets them.

#include "gtest/gtest.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;
using fakes::PrefillCall;

TEST_F(RouterFixture, HeldBlocksArePushedToAnotherDecodeWorker) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  std::shared_ptr<PrefillCall> held;
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    call->Started();
    call->Held(absl::Seconds(1));
    held = call;
  };
  StartRouter();
  const Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_EQ(answer.summary.kv_transport(), "fake-held");
  EXPECT_EQ(answer.summary.attempts(), 2u);
  EXPECT_EQ(answer.summary.prefill_worker(), p->address());
  ASSERT_EQ(p->prefills().size(), 1u) << "the prompt is computed once";
  ASSERT_EQ(p->pushes().size(), 1u);
  const auto push = p->pushes()[0];
  EXPECT_EQ(push.attempt_held(), 1u);
  EXPECT_EQ(push.attempt(), 2u);
  EXPECT_EQ(push.worker_epoch(), p->epoch());
  EXPECT_EQ(push.decode().address(), answer.summary.decode_worker());
  ASSERT_EQ(d1->decodes().size(), 1u);
  ASSERT_EQ(d2->decodes().size(), 1u);
  FakeWorker* const first = d1->decodes()[0].spec().key().attempt() == 1 ? d1 : d2;
  EXPECT_TRUE(first->WaitFor([&] { return first->cancels().size() == 1; }));
  held->Done();
  held->End(absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, TheLeaseIsRenewedWhileNoDecodeWorkerHasRoom) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Add({.num_blocks = 100});
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    d->SetLoad(0, 3, 99);  // somebody else took the room
    call->Held(absl::Milliseconds(120));
  };
  StartRouter();
  const auto call = Start(Tokens(200));
  ASSERT_TRUE(p->WaitFor([&] { return p->num_renewals() >= 3; }));
  EXPECT_TRUE(p->pushes().empty());
  d->SetLoad(0, 0, 0);
  const Answer answer = call->Wait();
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_EQ(p->prefills().size(), 1u);
}

TEST_F(RouterFixture, AFailedPushKeepsTheBlocksALostLeaseStartsAgain) {
  FakeWorker* const p = Prefill();
  Decode();
  Decode();
  std::atomic<int> holds{1};
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    if (holds.fetch_sub(1) <= 0) return p->DefaultPrefill(call);
    call->Accept();
    call->Held(absl::Seconds(10));
  };
  std::atomic<int> pushes{0};
  p->on_push_held = [&](const ferry::v1::PushHeldRequest& request) -> absl::Status {
    if (++pushes == 1) return absl::ResourceExhaustedError("no room there either");
    ferry::v1::RequestKey key;
    key.set_request_id(request.request_id());
    key.set_attempt(request.attempt());
    return directory_.at(request.decode().address())->Deliver(key) ? absl::OkStatus()
                                                                   : absl::AbortedError("not open");
  };
  StartRouter();
  Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.attempts(), 3u);
  EXPECT_EQ(p->prefills().size(), 1u);

  holds = 1;
  p->on_push_held = [](const ferry::v1::PushHeldRequest&) {
    return absl::NotFoundError("the lease has expired");
  };
  answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(p->prefills().size(), 3u) << "computed again";
  EXPECT_TRUE(IsIdle());
}

}  // namespace
}  // namespace router

// More than the workers can take: who goes first, who is refused and when to come back, and that
// tenants do not touch each other.

#include <atomic>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using testing::HasSubstr;

class OverloadTest : public RouterFixture {
 protected:
  static ferry::v1::GenerateRequest Of(const std::string& tenant) {
    auto request = Text("hi");
    request.set_tenant(tenant);
    return request;
  }
  // A decode worker that accepts requests, says that they run, and answers them when told.
  FakeWorker* Holding(uint32_t max_seqs) {
    holding_ = Add({.max_seqs = max_seqs});
    holding_->on_decode = [this](std::shared_ptr<DecodeCall> call) {
      call->Accept();
      const std::lock_guard<std::mutex> lock(mutex_);
      held_.push_back(std::move(call));
      holding_->SetLoad(0, static_cast<uint32_t>(held_.size()), 0);
    };
    return holding_;
  }
  void AnswerAll() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& call : held_) call->Answer("hello");
    held_.clear();
    holding_->SetLoad(0, 0, 0);
  }

  FakeWorker* holding_ = nullptr;
  std::mutex mutex_;  // guards held_
  std::vector<std::shared_ptr<DecodeCall>> held_;
};

TEST_F(OverloadTest, AFullQueueSaysWhenToComeBack) {
  options_.max_queue = 1;
  FakeWorker* const worker = Holding(/*max_seqs=*/1);  // runs one, and two more may wait there
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (size_t i = 1; i <= 2; ++i) {
    calls.push_back(Start(Text("hi")));
    ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == i; }));
  }
  calls.push_back(Start(Text("waits")));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 3; }));
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Text("too much"));
  ferry::v1::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  const absl::Status refused = status::FromGrpc(reader->Finish());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(refused), status::kQueueFull);
  EXPECT_GT(status::RetryAfter(refused), absl::ZeroDuration());
  const auto& trailing = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailing.count("retry-after-ms"), 1u);
  const auto value = trailing.find("retry-after-ms")->second;
  EXPECT_EQ(std::string(value.data(), value.size()),
            absl::StrCat(absl::ToInt64Milliseconds(status::RetryAfter(refused))));
  ASSERT_TRUE(Eventually([&] {
    AnswerAll();
    return router_->num_running() == 0;
  }));
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
}

TEST_F(OverloadTest, ATenantAtItsLimitWaitsAndTheOthersDoNot) {
  options_.tenant_limits = {"a=1:1"};
  FakeWorker* const worker = Holding(/*max_seqs=*/100);
  StartRouter();
  const auto first = Start(Of("a"));
  ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == 1; }));
  const auto second = Start(Of("a"));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 2; }));
  const absl::Status third = Generate(Of("a")).status;
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(third), status::kTenantLimit);
  EXPECT_THAT(std::string(third.message()), HasSubstr("tenant a: 1 requests wait, the limit is 1"));
  EXPECT_GT(status::RetryAfter(third), absl::ZeroDuration());
  const auto other = Start(Of("b"));
  const auto nobody = Start(Text("hi"));
  ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == 3; }));
  AnswerAll();
  EXPECT_EQ(first->Wait().status, absl::OkStatus());
  EXPECT_EQ(other->Wait().status, absl::OkStatus());
  EXPECT_EQ(nobody->Wait().status, absl::OkStatus());
  ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == 4; }));
  AnswerAll();
  EXPECT_EQ(second->Wait().status, absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

TEST_F(OverloadTest, ATenantThatAsksTooFastIsRefusedAndTheOthersAreNot) {
  options_.tenant_limits = {"a=0:0:0.001"};
  Decode();
  StartRouter();
  EXPECT_EQ(Generate(Of("a")).status, absl::OkStatus());
  const absl::Status refused = Generate(Of("a")).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(refused), status::kTenantLimit);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("tenant a: more than 0.001 requests a second"));
  EXPECT_GT(status::RetryAfter(refused), absl::Seconds(900)) << "what is known is told as it is";
  EXPECT_LE(status::RetryAfter(refused), absl::Seconds(1000));
  EXPECT_EQ(Generate(Of("b")).status, absl::OkStatus());
  EXPECT_EQ(Generate(Text("hi")).status, absl::OkStatus());
}

TEST_F(OverloadTest, EqualPromptsOfTwoTenantsShareNoBlocks) {
  FakeWorker* const worker = Decode();
  StartRouter();
  std::set<std::string> namespaces;
  for (const char* tenant : {"", "a", "b"}) {
    auto request = Tokens(60);
    request.set_tenant(tenant);
    ASSERT_EQ(Generate(request).status, absl::OkStatus());
    namespaces.insert(worker->decodes().back().spec().cache_namespace());
  }
  EXPECT_EQ(namespaces.size(), 3u);
  // What the router knows of one tenant's blocks is nothing for another's request.
  auto request = Tokens(300);
  request.set_tenant("a");
  worker->Store(ChainOf(request));
  const auto cached = [&] {
    std::vector<int32_t> blocks;
    router_->loop()->Run(
        [&] { blocks = router_->index().Lookup(ChainOf(request), EventLoop::Now()); });
    return blocks.empty() ? 0 : blocks[0];
  };
  ASSERT_TRUE(Eventually([&] {
    const auto blocks = router_->index().Lookup(ChainOf(request), EventLoop::Now());
    return !blocks.empty() && blocks[0] == 4;
  }));
  request.set_tenant("b");
  EXPECT_EQ(cached(), 0);
}

TEST_F(OverloadTest, ARequestThatFindsNoRoomInItsTimeIsRefused) {
  FakeWorker* const worker = Holding(/*max_seqs=*/1);
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (size_t i = 1; i <= 2; ++i) {
    calls.push_back(Start(Text("hi")));
    ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == i; }));
  }
  auto request = Text("impatient");
  request.set_max_ttft_ms(200);
  const absl::Status refused = Generate(request).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(refused), status::kDeadline);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("within the 200ms allowed"));
  EXPECT_GT(status::RetryAfter(refused), absl::ZeroDuration());
  AnswerAll();
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

// The queue's speed is known by then: a request is refused at once, not when its time is over.
TEST_F(OverloadTest, ARequestWhoseTurnWouldComeTooLateIsRefusedAtOnce) {
  FakeWorker* const worker = Holding(/*max_seqs=*/1);
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (size_t i = 1; i <= 20; ++i) {
    calls.push_back(Start(Text("a prompt of some length", 256)));
    ASSERT_TRUE(Eventually([&] { return router_->num_running() == i; }));
  }
  while (worker->decodes().size() < 8) {  // the worker takes at least 50 ms for each two
    const size_t heard = worker->decodes().size();
    const absl::Time until = absl::Now() + absl::Milliseconds(50);
    ASSERT_TRUE(Eventually([&] { return absl::Now() >= until; }));
    AnswerAll();
    ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() > heard; }));
  }
  auto request = Text("impatient");
  request.set_max_ttft_ms(20);
  const absl::Status refused = Generate(request).status;
  EXPECT_EQ(status::Reason(refused), status::kDeadline) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the first token is foreseen in"));
  EXPECT_GT(status::RetryAfter(refused), absl::ZeroDuration());
  ASSERT_TRUE(Eventually([&] {
    AnswerAll();
    return router_->num_running() == 0;
  }));
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
}

// A request that has ended does not make its worker look busy until the next report.
TEST_F(OverloadTest, AStaleReportDoesNotCountWhatIsOver) {
  options_.heartbeat = absl::Seconds(600);  // the router is patient
  FakeWorker* const worker = Holding(/*max_seqs=*/8);
  const auto num_reports = std::make_shared<std::atomic<int>>(0);
  worker->on_report = [num_reports](ferry::v1::LoadReport* report) {
    report->set_step_ms(++*num_reports);
  };
  StartRouter();
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(worker->WaitFor([&] { return worker->decodes().size() == 1; }));
  const auto seen = [&] {
    return router_->registry().View(router_->registry().link(0), 0, EventLoop::Now());
  };
  ASSERT_TRUE(Eventually([&] {  // until reports show it, and the ledger knows that they do
    worker->SetLoad(2, 1, 1);
    return router_->registry().link(0).load().running_requests == 1 &&
           router_->ledger().uncommitted(0).requests == 0;
  }));
  // None comes any more, nor is on its way, when the request ends.
  worker->PauseReports(true);
  ASSERT_TRUE(
      Eventually([&] { return router_->registry().link(0).load().step_ms == *num_reports; }));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_.at(0)->Answer("hello");  // and no report
    held_.clear();
  }
  EXPECT_EQ(call->Wait().status, absl::OkStatus());
  EXPECT_TRUE(Eventually([&] {
    return router_->registry().link(0).load().running_requests == 1 && seen().requests == 0 &&
           seen().used_blocks == 0 && seen().waiting_tokens == 0;
  }));
}

TEST_F(OverloadTest, BadPrioritiesAndTenantsAreToldApart) {
  Decode();
  StartRouter();
  auto request = Text("hi");
  request.set_priority(101);
  EXPECT_THAT(std::string(Generate(request).status.message()),
              HasSubstr("priority is 101: must be in [-100, 100]"));
  request.set_priority(-100);
  request.set_tenant("a b");
  EXPECT_THAT(std::string(Generate(request).status.message()),
              HasSubstr("tenant \"a b\" has a character"));
  request.set_tenant(std::string(129, 'a'));
  EXPECT_THAT(std::string(Generate(request).status.message()), HasSubstr("tenant has 129"));
  request.set_tenant("a");
  EXPECT_EQ(Generate(request).status, absl::OkStatus());
}

}  // namespace
}  // namespace router

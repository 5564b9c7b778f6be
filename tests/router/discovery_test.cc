// Workers behind a DNS name come and go while the router runs.

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "prometheus/text_serializer.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using testing::HasSubstr;
using testing::Not;

class DiscoveryTest : public RouterFixture {
 protected:
  // A decode worker that the router is not told of.
  FakeWorker* Hidden() {
    FakeWorker* const worker = Decode();
    options_.workers.pop_back();
    return worker;
  }
  // The look-up itself says a port where nobody is; then the test says what is found.
  void StartWithAName(const std::vector<FakeWorker*>& found) {
    options_.workers.push_back("dns:///127.0.0.1:1");
    options_.dns_refresh = absl::Hours(1);
    StartRouterAlone();
    ASSERT_TRUE(Eventually([&] { return router_->registry().num_workers() > 0; }));
    Find(found);
    ASSERT_TRUE(WaitForWorkers(0, found.size()));
  }
  void Find(const std::vector<FakeWorker*>& workers) {
    std::vector<std::string> addresses;
    for (const FakeWorker* worker : workers) addresses.push_back(worker->address());
    Find(absl::StatusOr<std::vector<std::string>>(addresses));
  }
  void Find(const absl::StatusOr<std::vector<std::string>>& addresses) {
    router_->loop()->Run([&] { router_->registry().SetFound(0, addresses); });
  }
  // On the loop.
  bool Knows(const std::string& address) {
    for (WorkerSlot slot = 0; slot < router_->registry().num_workers(); ++slot) {
      const WorkerLink& link = router_->registry().link(slot);
      if (link.address() == address && link.state() != LinkState::kGone) return true;
    }
    return false;
  }
  std::string Metrics() { return prometheus::TextSerializer().Serialize(metrics_->Collect()); }
};

TEST_F(DiscoveryTest, AWorkerIsWhereItsNameLeads) {
  FakeWorker* const d = Hidden();
  options_.workers.push_back(absl::StrCat("dns:///127.0.0.1:", d->port()));
  StartRouterAlone();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_EQ(Generate(Text("hi")).summary.decode_worker(), d->address());
}

TEST_F(DiscoveryTest, WhatRunsAtAWorkerThatIsNoLongerFoundRunsToItsEnd) {
  FakeWorker* const d1 = Hidden();
  FakeWorker* const d2 = Hidden();
  std::shared_ptr<DecodeCall> open;
  d1->on_decode = [&](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  StartWithAName({d1});
  const auto running = Start(Text("hi"));
  ASSERT_TRUE(Eventually([&] { return running->num_messages() > 0; }));

  Find({d2});
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_EQ(Generate(Text("ho")).summary.decode_worker(), d2->address());
  // Those that may go have gone.
  ASSERT_TRUE(Eventually([&] { return !Knows("127.0.0.1:1"); }));
  EXPECT_TRUE(Eventually([&] { return Knows(d1->address()); })) << "a request runs there";
  EXPECT_THAT(Metrics(), HasSubstr(absl::StrCat("\"", d1->address(), "\"")));

  open->Answer("b");
  const Answer answer = running->Wait();
  EXPECT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "ab");
  ASSERT_TRUE(Eventually([&] { return !Knows(d1->address()); }));
  EXPECT_THAT(Metrics(), Not(HasSubstr(absl::StrCat("\"", d1->address(), "\""))));
  EXPECT_EQ(Generate(Text("ho")).status, absl::OkStatus());

  // Its slot, and that of the address where nobody was, serve others.
  FakeWorker* const d3 = Hidden();
  FakeWorker* const d4 = Hidden();
  Find({d2, d3, d4});
  ASSERT_TRUE(WaitForWorkers(0, 3));
  EXPECT_TRUE(Eventually([&] { return router_->registry().num_workers() == 3; }));
  EXPECT_TRUE(IsIdle());
}

TEST_F(DiscoveryTest, AWorkerThatIsFoundAgainStays) {
  FakeWorker* const d1 = Hidden();
  StartWithAName({d1});
  FakeWorker* const d2 = Hidden();
  std::shared_ptr<DecodeCall> open;
  d1->on_decode = [&](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  const auto running = Start(Text("hi"));
  ASSERT_TRUE(Eventually([&] { return running->num_messages() > 0; }));
  Find({d2});
  ASSERT_TRUE(WaitForWorkers(0, 1));
  Find({d1, d2});
  ASSERT_TRUE(WaitForWorkers(0, 2));
  d1->on_decode = nullptr;
  open->Answer("b");
  EXPECT_EQ(running->Wait().texts.at(0), "ab");
  Find({d1});
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_EQ(Generate(Text("ho")).summary.decode_worker(), d1->address());
}

TEST_F(DiscoveryTest, WithoutAnAnswerNothingChangesAndWithAnEmptyOneOnlyTheDeadGo) {
  FakeWorker* const d1 = Hidden();
  FakeWorker* const d2 = Hidden();
  StartWithAName({d1, d2});
  Find(absl::UnavailableError("no server"));
  Find(absl::NotFoundError("no such name"));
  d1->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  Find(absl::UnavailableError("no server"));
  EXPECT_TRUE(Eventually([&] { return Knows(d1->address()); }));
  Find(absl::NotFoundError("no such name"));
  ASSERT_TRUE(Eventually([&] { return !Knows(d1->address()); }));
  EXPECT_TRUE(Eventually([&] { return Knows(d2->address()); }));
  EXPECT_EQ(Generate(Text("hi")).summary.decode_worker(), d2->address());
}

TEST_F(DiscoveryTest, WhoIsAskedForTooEarlyIsToldWhatIsUnknown) {
  options_.worker_wait = absl::Milliseconds(10);
  options_.workers.push_back("dns:///127.0.0.1:1");
  options_.dns_refresh = absl::Hours(1);
  StartRouterAlone();
  ASSERT_TRUE(Eventually([&] { return router_->registry().num_workers() > 0; }));
  Find(absl::NotFoundError("dns:///127.0.0.1:1 has no address: no such name"));
  const Answer answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()),
              HasSubstr("dns:///127.0.0.1:1 has no address: no such name"));
}

TEST_F(DiscoveryTest, AWorkerWithTwoAddressesIsOne) {
  FakeWorker* const d = Decode();
  options_.workers.push_back(absl::StrCat("localhost:", d->port()));
  StartRouter();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_EQ(Generate(Text("hi")).status, absl::OkStatus());
  d->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
}

}  // namespace
}  // namespace router

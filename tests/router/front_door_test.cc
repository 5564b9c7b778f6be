#include "router/front_door.h"

#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A client that only hears of the end.
class Listener final : public ClientStream {
 public:
  explicit Listener(bool gone = false) : gone_(gone) {}
  void Write(const ferry::v1::GenerateResponse&) override {}
  void Finish(const absl::Status& status) override { end_.set_value(status); }
  size_t pending_bytes() const override { return 0; }
  bool gone() const override { return gone_; }
  absl::Status End() { return end_.get_future().get(); }

 private:
  const bool gone_;
  std::promise<absl::Status> end_;
};

class FrontDoorTest : public RouterFixture {
 protected:
  FrontDoor::Entry EntryOf(const ferry::v1::GenerateRequest& request,
                           std::shared_ptr<Listener> client) {
    return {.arrival = {.number = router_->NextNumber(),
                        .time = EventLoop::Now(),
                        .deadline = EventLoop::Now() + absl::Seconds(30)},
            .request = std::make_shared<ferry::v1::GenerateRequest>(request),
            .client = std::move(client)};
  }
  // Observations of the stage "tokenize".
  uint64_t NumTokenized() const {
    for (const auto& family : metrics_->Collect()) {
      if (family.name != "ferry_router_stage_seconds") continue;
      for (const auto& metric : family.metric) {
        for (const auto& label : metric.label) {
          if (label.value == "tokenize") return metric.histogram.sample_count;
        }
      }
    }
    return 0;
  }
};

TEST_F(FrontDoorTest, NothingIsTokenisedForAClientThatHasGone) {
  fakes::FakeWorker* const decode = Decode();
  StartRouter();
  const auto gone = std::make_shared<Listener>(/*gone=*/true);
  door_->Enter({EntryOf(Text("say hi"), gone)});
  EXPECT_EQ(gone->End().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(NumTokenized(), 0u);
  const auto here = std::make_shared<Listener>();
  door_->Enter({EntryOf(Text("say hi"), here)});
  EXPECT_TRUE(here->End().ok());
  EXPECT_EQ(NumTokenized(), 1u);
  EXPECT_EQ(decode->decodes().size(), 1u);
}

TEST_F(FrontDoorTest, RequestsOfOneCallEnterTogetherOrNotAtAll) {
  fakes::FakeWorker* const decode = Decode();
  StartRouter();
  for (const auto& [wrong, why] :
       {std::pair{Text(std::string(5000, 'x')), "prompt has 5000 tokens"},
        std::pair{Text(""), "prompt text is empty"}}) {
    std::vector<std::shared_ptr<Listener>> clients;
    std::vector<FrontDoor::Entry> entries;
    for (const auto& request : {Text("good"), wrong, Text("good, too")}) {
      clients.push_back(std::make_shared<Listener>());
      entries.push_back(EntryOf(request, clients.back()));
    }
    door_->Enter(std::move(entries));
    EXPECT_EQ(clients[0]->End().code(), absl::StatusCode::kCancelled);
    EXPECT_THAT(std::string(clients[1]->End().message()), HasSubstr(why));
    EXPECT_EQ(clients[2]->End().code(), absl::StatusCode::kCancelled);
  }
  EXPECT_TRUE(IsIdle());
  EXPECT_TRUE(decode->decodes().empty());
}

TEST_F(FrontDoorTest, ACallThatTheQueueRefusesIsRefusedOnce) {
  options_.max_queue = 2;
  options_.tenant_limits = {"acme=0:0:0.001"};
  fakes::FakeWorker* const decode = Decode();
  StartRouter();
  const auto enter = [&](const std::string& tenant, size_t num_requests, absl::Duration budget) {
    ferry::v1::GenerateRequest request = Text("x");
    request.set_tenant(tenant);
    std::vector<std::shared_ptr<Listener>> clients;
    std::vector<FrontDoor::Entry> entries;
    for (size_t i = 0; i < num_requests; ++i) {
      clients.push_back(std::make_shared<Listener>());
      entries.push_back(EntryOf(request, clients.back()));
      entries.back().arrival.deadline = EventLoop::Now() + budget;
    }
    door_->Enter(std::move(entries));
    std::vector<absl::StatusCode> ends;
    for (const auto& client : clients) ends.push_back(client->End().code());
    return ends;
  };
  using Code = absl::StatusCode;
  const absl::Duration budget = absl::Seconds(30);
  EXPECT_THAT(enter("", 3, budget),
              ElementsAre(Code::kInvalidArgument, Code::kCancelled, Code::kCancelled));
  EXPECT_THAT(enter("acme", 2, budget), ElementsAre(Code::kOk, Code::kOk));
  EXPECT_THAT(enter("acme", 2, budget), ElementsAre(Code::kResourceExhausted, Code::kCancelled));
  EXPECT_THAT(enter("", 2, absl::ZeroDuration()),
              ElementsAre(Code::kDeadlineExceeded, Code::kCancelled));
  EXPECT_TRUE(IsIdle());
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"call_too_large\"}"), "1");
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"tenant_limit\"}"), "1");
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"cancelled\"}"), "");
  EXPECT_EQ(decode->decodes().size(), 2u);
}

}  // namespace
}  // namespace router

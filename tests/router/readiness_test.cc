// When the router says that it is ready: what /ready, the gRPC health service and so the probes of
// Kubernetes go by.

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/public_message.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class ReadinessTest : public RouterFixture {
 protected:
  absl::Status Ready() {
    absl::Status status;
    router_->loop()->Run([&] { status = router_->CheckReady(); });
    return status;
  }
  // What CheckReady says of model m, as soon as a lost worker's trouble is known, and the health
  // service with it.
  void ExpectNotReady(const std::string& why) {
    const std::string words = absl::StrCat("model m is not served now: ", why);
    absl::Status status;
    EXPECT_TRUE(Eventually([&] {
      status = router_->CheckReady();  // on the loop's thread
      return status.message().find(words) != std::string::npos;
    })) << status
        << " is not: " << words;
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(Eventually([this] { return !ready_; }));
  }
  void ExpectReady() {
    EXPECT_EQ(Ready(), absl::OkStatus());
    EXPECT_TRUE(Eventually([this] { return ready_; }));
  }
};

TEST_F(ReadinessTest, ADecodeWorkerAloneIsNotEnoughAndNeitherIsAPrefillWorker) {
  FakeWorker* const d = Decode();
  FakeWorker* const p = Prefill();
  StartRouter();
  ExpectReady();
  p->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  ExpectNotReady("no prefill worker is ready, nor a decode worker of --role=both; worker " +
                 p->address() + ": ");
  FakeWorker again({.role = ferry::v1::WORKER_ROLE_PREFILL, .port = p->port()}, &directory_);
  ASSERT_TRUE(WaitForWorkers(1, 1));
  ExpectReady();
  d->Kill();
  ASSERT_TRUE(WaitForWorkers(1, 0));
  ExpectNotReady("no decode worker is ready; worker " + d->address() + ": ");
}

TEST_F(ReadinessTest, ADecodeWorkerThatComputesEveryPromptIsEnough) {
  FakeWorker* const both = Add(ferry::v1::WORKER_ROLE_BOTH);
  StartRouter();
  ExpectReady();
  both->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  ExpectNotReady("neither a prefill nor a decode worker is ready; worker " + both->address());
}

TEST_F(ReadinessTest, ADecodeWorkerIsEnoughWhereEveryPromptIsShort) {
  options_.local_prefill_tokens = 4096;  // the model's length
  Decode();
  StartRouter();
  ExpectReady();
  EXPECT_EQ(Generate(Tokens(4000)).status, absl::OkStatus());
}

TEST_F(ReadinessTest, WorkersThatDoNotFitEachOtherAreNoPairAndTheReasonSaysWhy) {
  FakeWorker* const p = Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .block_size = 64});
  FakeWorker* const d = Add({.block_size = 128});
  StartRouter();
  ExpectNotReady(
      absl::StrCat("no prefill worker that is ready fits a decode worker that is; "
                   "block_size is 64 at prefill worker ",
                   p->address(), " and 128 at decode worker ", d->address()));
  EXPECT_EQ(status::PublicMessage(Ready()),
            "model m is not served now: no prefill worker that is ready fits a decode worker that "
            "is");
}

TEST_F(ReadinessTest, AWorkerThatDrainsIsNamed) {
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  p->SetState(ferry::v1::WORKER_STATE_DRAINING);
  ExpectNotReady(
      absl::StrCat("no prefill worker is ready, nor a decode worker of --role=both; worker ",
                   p->address(), " takes no more requests (prefill, draining)"));
  p->SetState(ferry::v1::WORKER_STATE_SERVING);
  EXPECT_TRUE(Eventually([this] { return ready_; }));
  ExpectReady();
}

TEST_F(ReadinessTest, AWorkerThatIsSilentIsNamedBeforeItIsHeldForDead) {
  options_.heartbeat = absl::Milliseconds(100);
  FakeWorker* const d = Decode();
  Prefill();
  StartRouter();
  d->PauseReports(true);
  EXPECT_TRUE(Eventually([this] { return !ready_; }));
  std::string words;
  router_->loop()->Run([&] { words = std::string(readiness_.message()); });
  EXPECT_THAT(words, HasSubstr("model m is not served now: no decode worker is ready; worker " +
                               d->address() + " has been silent for "));
  EXPECT_THAT(words, HasSubstr("(decode, suspect)"));
}

// The log's line is written once, when it happens.
TEST_F(ReadinessTest, WhoIsLostIsNamedInTheMomentInWhichTheRouterIsNotReadyAnyMore) {
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  p->Kill();
  EXPECT_TRUE(Eventually([this] { return !ready_; }));
  std::string words;
  router_->loop()->Run([&] { words = std::string(readiness_.message()); });
  EXPECT_THAT(words, HasSubstr("; worker " + p->address() + ": ")) << "and what its stream said";
}

TEST_F(ReadinessTest, OneModelIsEnough) {
  models_ = {"m", "n"};
  FakeWorker* const both = Add(ferry::v1::WORKER_ROLE_BOTH);
  StartRouter();
  ExpectReady();
  both->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  EXPECT_THAT(std::string(Ready().message()), AllOf(HasSubstr("model m is not served now"),
                                                    HasSubstr("model n is not served now")));
}

TEST_F(ReadinessTest, ARouterThatDrainsIsNotReadyWhateverBecomesOfItsWorkers) {
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  router_->StartDrain();
  EXPECT_EQ(Ready(), absl::UnavailableError("the router is draining"));
  EXPECT_TRUE(Eventually([this] { return !ready_; }));
  p->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_EQ(Ready(), absl::UnavailableError("the router is draining"));
}

}  // namespace
}  // namespace router

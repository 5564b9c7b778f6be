// Workers that do not fit each other, or the router: requests go where they can, and whoever asks
// is told why the others are not used.

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using fakes::PrefillCall;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr auto kPrefill = ferry::v1::WORKER_ROLE_PREFILL;

class MisfitsTest : public RouterFixture {
 protected:
  static absl::Status Incompatible(const std::string& words) {
    return status::WithReason(absl::FailedPreconditionError(words), status::kIncompatible);
  }
  static void ExpectIncompatible(const absl::Status& status, const std::string& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(status::Reason(status), status::kIncompatible);
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_EQ(status.message().find("start a ferry-prefill"), std::string::npos)
        << "one more would not help: " << status;
  }
};

TEST_F(MisfitsTest, AClientIsToldWhichValuesDifferAtWhichWorkersAndNothingIsTried) {
  FakeWorker* const p = Add({.role = kPrefill, .block_size = 64});
  FakeWorker* const d = Add({.block_size = 128});
  StartRouter();
  const std::string words = absl::StrCat("block_size is 64 at prefill worker ", p->address(),
                                         " and 128 at decode worker ", d->address());
  ExpectIncompatible(Generate(Tokens(200)).status, words);
  EXPECT_TRUE(d->decodes().empty());
  EXPECT_EQ(Generate(Text("short prompts still work")).status, absl::OkStatus());
  const ferry::v1::ListModelsResponse models = ListModels();
  EXPECT_THAT(models.misfits(), ElementsAre(words));
  EXPECT_EQ(models.models(0).ready_prefill_workers(), 0u);
  EXPECT_EQ(models.models(0).ready_decode_workers(), 1u);
  EXPECT_FALSE(models.models(0).ready());
}

TEST_F(MisfitsTest, WorkersWithoutACommonLinkAreNoPair) {
  FakeWorker* const shm = Add({.role = kPrefill, .links = {"shm"}});
  FakeWorker* const tcp = Add({.role = kPrefill, .links = {"tcp"}});
  FakeWorker* const d = Add({.links = {"tcp"}});
  StartRouter();
  for (int i = 0; i < 10; ++i) {
    const Answer answer = Generate(Tokens(200, i));
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.summary.prefill_worker(), tcp->address());
    EXPECT_EQ(answer.summary.attempts(), 1u);
  }
  EXPECT_EQ(ListModels().models(0).ready_prefill_workers(), 1u);
  tcp->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  ExpectIncompatible(Generate(Tokens(200)).status,
                     absl::StrCat("no data link in common: --links is shm at prefill worker ",
                                  shm->address(), " and tcp at decode worker ", d->address()));
}

// What GetInfo does not show is learned by one try, which costs the request none of its attempts.
TEST_F(MisfitsTest, APairThatATryHasShownNotToFitIsRememberedUntilAProcessIsAnother) {
  options_.max_attempts = 1;
  FakeWorker* const p1 = Prefill();
  FakeWorker* const d = Decode();
  p1->on_prefill = [](std::shared_ptr<PrefillCall> call) {
    call->End(Incompatible("the moon is full"));
  };
  StartRouter();
  for (int i = 0; i < 2; ++i) {
    ExpectIncompatible(Generate(Tokens(200)).status,
                       absl::StrCat("worker ", p1->address(), ": the moon is full"));
  }
  EXPECT_EQ(p1->prefills().size(), 1u);
  EXPECT_TRUE(d->WaitFor([&] { return d->num_broken() == 1; }));
  EXPECT_THAT(ListModels().misfits(), ElementsAre(HasSubstr("the moon is full")));
  const int32_t port = p1->port();
  p1->Kill();
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(0).state() == LinkState::kDead; }));
  FakeWorker restarted({.role = kPrefill, .port = port}, &directory_);
  ASSERT_TRUE(WaitForWorkers(1, 1));
  EXPECT_EQ(Generate(Tokens(200)).status, absl::OkStatus());
  EXPECT_THAT(ListModels().misfits(), IsEmpty());
}

TEST_F(MisfitsTest, HeldBlocksGoToADecodeWorkerThatFitsOrArePromptlyComputedElsewhere) {
  FakeWorker* const p1 = Prefill();
  std::vector<FakeWorker*> decodes = {Decode(), Decode(), Decode()};
  p1->on_prefill = [](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    call->Held(absl::Seconds(10));
  };
  std::atomic<int> pushes{0};
  p1->on_push_held = [&](const ferry::v1::PushHeldRequest&) {
    ++pushes;
    return Incompatible("not there");
  };
  FakeWorker* const p2 = Prefill();
  p2->SetLoad(1000000, 0, 0);  // at first everything goes to the other one
  StartRouter();
  const auto call = Start(Tokens(200));
  ASSERT_TRUE(p1->WaitFor([&] { return pushes == 3; })) << "the first decode worker comes again";
  p2->SetLoad(0, 0, 0);
  const Answer answer = call->Wait();
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.prefill_worker(), p2->address());
  EXPECT_EQ(p1->prefills().size(), 1u);
  EXPECT_EQ(pushes, 3);
  EXPECT_TRUE(p1->WaitFor([&] { return p1->num_broken() == 1; })) << "the blocks are let go";
  EXPECT_TRUE(IsIdle());
}

TEST_F(MisfitsTest, AWorkerOfAnotherModelOrTokenizerIsNamed) {
  models_ = {"m", "n"};
  Add(ferry::v1::WORKER_ROLE_BOTH);
  FakeWorker* const x = Add({.model = "x"});
  StartRouter();
  const std::string words =
      absl::StrCat("worker ", x->address(), " serves model x, this router serves m, n");
  EXPECT_THAT(ListModels().misfits(), ElementsAre(HasSubstr(words)));
  ferry::v1::GenerateRequest request = Text("hi");
  request.set_model("n");
  const absl::Status status = Generate(request).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no decode worker serves model n now; models served now: m; " + words));
}

TEST_F(MisfitsTest, AWorkerThatDoesNotAnswerIsNamed) {
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  EXPECT_THAT(ListModels().unreachable(), IsEmpty());
  const std::string address = p->address();
  p->Kill();
  ASSERT_TRUE(Eventually([&] { return !router_->registry().Away().empty(); }));
  EXPECT_THAT(ListModels().unreachable(), ElementsAre(HasSubstr("worker " + address + ": ")));
}

// No comparison of costs means anything with such numbers, and some would draw all requests there.
TEST_F(MisfitsTest, AWorkerThatStatesNumbersThatAreNoneIsNotUsed) {
  using ferry::v1::WorkerInfo;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::string, std::function<void(WorkerInfo*)>>> wrongs = {
      {"prefill_tokens_per_s nan", [](auto* info) { info->set_prefill_tokens_per_s(kNan); }},
      {"prefill_tokens_per_s -1", [](auto* info) { info->set_prefill_tokens_per_s(-1); }},
      {"prefill_s_per_token2 nan", [](auto* info) { info->set_prefill_s_per_token2(kNan); }},
      {"prefill_s_per_token2 inf", [](auto* info) { info->set_prefill_s_per_token2(kInfinite); }},
      {"decode_step_ms inf", [](auto* info) { info->set_decode_step_ms(kInfinite); }},
      {"decode_step_ms_per_seq -0.5", [](auto* info) { info->set_decode_step_ms_per_seq(-0.5); }},
      {"block_size 0", [](auto* info) { info->set_block_size(0); }},
      {"max_seqs -1", [](auto* info) { info->set_max_seqs(0xffffffff); }},
      {"num_state_slots -1", [](auto* info) { info->set_num_state_slots(0xffffffff); }},
      {"num_blocks 2.14748e+09 is not within 0 to 2.68435e+08",
       [](auto* info) { info->set_num_blocks(0x7fffffff); }},
      {"block_bytes -1", [](auto* info) { info->set_block_bytes(~uint64_t{0}); }}};
  std::vector<std::string> sentences;
  for (const auto& [words, wrong] : wrongs) {
    FakeWorker* const worker = Decode();
    worker->on_info = wrong;
    sentences.push_back(
        absl::StrCat("worker ", worker->address(), ": its GetInfo is unusable: ", words));
  }
  FakeWorker* const good = Decode();
  StartRouterAlone();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  ASSERT_TRUE(Eventually([&] { return router_->registry().Away().size() == wrongs.size(); }));
  std::vector<testing::Matcher<std::string>> expected;
  for (const std::string& sentence : sentences) expected.push_back(HasSubstr(sentence));
  EXPECT_THAT(router_->registry().Away(), testing::ElementsAreArray(expected));
  EXPECT_EQ(Generate(Text("hello")).status, absl::OkStatus());
  EXPECT_EQ(good->decodes().size(), 1u);
}

TEST_F(MisfitsTest, AReportOfImpossibleLoadIsThatOfAFullWorker) {
  FakeWorker* const absurd = Prefill();
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  absurd->on_report = [](ferry::v1::LoadReport* report) {
    report->set_waiting_tokens(~uint64_t{0});  // -1 of what has a sign
    report->set_step_ms(std::numeric_limits<double>::infinity());
  };
  FakeWorker* const full = Decode();
  full->on_report = [](ferry::v1::LoadReport* report) {
    report->set_running_requests(0xffffffff);
    report->set_waiting_requests(0xffffffff);
    report->mutable_kv_blocks()->set_active(0xffffffff);
    report->mutable_kv_blocks()->set_held(0xffffffff);
  };
  StartRouter();
  for (int i = 0; i < 10; ++i) ASSERT_EQ(Generate(Tokens(1000, i)).status, absl::OkStatus());
  EXPECT_EQ(p->prefills().size(), 10u);
  EXPECT_EQ(d->decodes().size(), 10u);
}

// Its reports leave out nine of ten requests; the router knows of its own.
TEST_F(MisfitsTest, AWorkerThatUnderstatesItsLoadDrawsNoMoreThanItsShare) {
  std::atomic<uint32_t> honest_open{0}, false_open{0};
  FakeWorker* const honest = Decode();
  FakeWorker* const understating = Decode();
  std::vector<std::shared_ptr<DecodeCall>> open;
  std::mutex mutex;  // guards open
  const auto keep_open = [&](std::atomic<uint32_t>* count) {
    return [&, count](std::shared_ptr<DecodeCall> call) {
      call->Accept();
      ++*count;
      const std::lock_guard<std::mutex> lock(mutex);
      open.push_back(std::move(call));
    };
  };
  honest->on_decode = keep_open(&honest_open);
  understating->on_decode = keep_open(&false_open);
  honest->on_report = [&](auto* report) { report->set_running_requests(honest_open); };
  understating->on_report = [&](auto* report) { report->set_running_requests(false_open / 10); };
  for (FakeWorker* const worker : {honest, understating}) {
    worker->on_info = [](auto* info) { info->set_decode_step_ms_per_seq(1); };
  }
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (uint32_t i = 0; i < 20; ++i) {
    calls.push_back(Start(Tokens(20, i)));
    // Until the reports alone tell of it.
    ASSERT_TRUE(Eventually([&] {
      return honest_open + false_open == i + 1 && router_->ledger().uncommitted(0).requests == 0 &&
             router_->ledger().uncommitted(1).requests == 0;
    }));
  }
  EXPECT_LE(false_open, 12u) << "a little more or less is equally good";
  for (const auto& call : open) call->Answer("x");
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
}

}  // namespace
}  // namespace router

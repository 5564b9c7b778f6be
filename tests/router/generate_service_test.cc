// The router's service against fake workers, where nothing goes wrong: both routes, text, stop
// strings, branches, log-probabilities, models, prefix affinity, load.

#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(RouterFixture, AShortPromptIsAnsweredByTheDecodeWorkerAlone) {
  FakeWorker* const prefill = Prefill();
  FakeWorker* const decode = Decode();
  StartRouter();
  auto request = Text("say hello");
  request.mutable_sampling()->set_seed(7);
  request.set_request_id("my-request");
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_THAT(answer.tokens.at(0), ElementsAre('h', 'e', 'l', 'l', 'o'));
  EXPECT_EQ(answer.reasons.at(0), ferry::v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.num_summaries, 1);
  EXPECT_TRUE(answer.summary_was_last);
  EXPECT_EQ(answer.summary.request_id(), "my-request");
  EXPECT_EQ(answer.summary.prompt_tokens(), 9u);
  EXPECT_EQ(answer.summary.completion_tokens(), 5u);
  EXPECT_EQ(answer.summary.attempts(), 1u);
  EXPECT_EQ(answer.summary.seed(), 7u);
  EXPECT_EQ(answer.summary.prefill_worker(), decode->address());
  EXPECT_EQ(answer.summary.decode_worker(), decode->address());
  EXPECT_EQ(answer.summary.kv_bytes(), 0u);
  EXPECT_GT(answer.summary.ttft_ms(), 0);
  EXPECT_GE(answer.summary.total_ms(), answer.summary.ttft_ms());
  EXPECT_TRUE(prefill->prefills().empty());

  ASSERT_EQ(decode->decodes().size(), 1u);
  const ferry::v1::DecodeRequest sent = decode->decodes()[0];
  EXPECT_TRUE(sent.local_prefill());
  EXPECT_EQ(sent.worker_epoch(), decode->epoch());
  EXPECT_THAT(sent.spec().key().request_id(), StartsWith("my-request#"));
  EXPECT_EQ(sent.spec().key().attempt(), 1u);
  EXPECT_EQ(sent.spec().num_prompt_tokens(), 9u);
  EXPECT_EQ(sent.spec().model(), "m");
  EXPECT_THAT(sent.spec().sampling().stop_token_ids(), ElementsAre(1));
  EXPECT_GT(sent.spec().deadline_ms(), 20000u);
  EXPECT_LE(sent.spec().deadline_ms(), 30100u);  // gRPC rounds a timeout up to tenths of a second
  EXPECT_TRUE(IsIdle());
  EXPECT_TRUE(decode->cancels().empty()) << "a finished request is not cancelled";
}

TEST_F(RouterFixture, AClientMayUseItsRequestIdAgain) {
  FakeWorker* const decode = Decode();
  StartRouter();
  ferry::v1::GenerateRequest request = Text("hi");
  request.set_request_id("mine");
  std::set<std::string> names;
  for (int i = 0; i < 3; ++i) {
    const Answer answer = Generate(request);
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.summary.request_id(), "mine");
    names.insert(decode->decodes().back().spec().key().request_id());
  }
  EXPECT_EQ(names.size(), 3u) << "workers never hear one name for two requests";
}

TEST_F(RouterFixture, ALongPromptGoesThroughBothWorkers) {
  FakeWorker* const prefill = Prefill();
  FakeWorker* const decode = Decode();
  StartRouter();
  const Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_EQ(answer.summary.prefill_worker(), prefill->address());
  EXPECT_EQ(answer.summary.decode_worker(), decode->address());
  EXPECT_EQ(answer.summary.kv_bytes(), 1000u);
  EXPECT_EQ(answer.summary.kv_blocks(), 2u);
  EXPECT_EQ(answer.summary.kv_transport(), "fake");
  EXPECT_EQ(answer.summary.kv_transfer_ms(), 1.5);
  EXPECT_EQ(answer.summary.request_id().size(), 32u) << "made by the router";
  ASSERT_EQ(prefill->prefills().size(), 1u);
  ASSERT_EQ(decode->decodes().size(), 1u);
  const auto at_prefill = prefill->prefills()[0];
  const auto at_decode = decode->decodes()[0];
  EXPECT_FALSE(at_decode.local_prefill());
  EXPECT_EQ(at_decode.prefill().address(), prefill->address());
  EXPECT_EQ(at_decode.prefill().epoch(), prefill->epoch());
  EXPECT_EQ(at_prefill.decode().address(), decode->address());
  EXPECT_EQ(at_prefill.decode().epoch(), decode->epoch());
  EXPECT_EQ(at_prefill.worker_epoch(), prefill->epoch());
  EXPECT_EQ(at_prefill.spec().sampling().SerializeAsString(),
            at_decode.spec().sampling().SerializeAsString())
      << "both draw the same numbers";
  EXPECT_EQ(at_prefill.spec().token_ids_size(), 200);
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, StopStringsCutAcrossTokensAndEndTheWork) {
  FakeWorker* const decode = Decode();
  std::shared_ptr<fakes::DecodeCall> open;
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    for (const char c : std::string("one two END three")) call->Tokens(0, std::string(1, c));
    open = call;  // it would go on for ever
  };
  StartRouter();
  auto request = Text("count", 1000);
  request.mutable_sampling()->add_stop(" END");
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "one two");
  EXPECT_EQ(answer.reasons.at(0), ferry::v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.summary.completion_tokens(), 11u) << "up to the token that completed it";
  EXPECT_TRUE(decode->WaitFor([&] { return decode->cancels().size() == 1 && open->broken(); }));
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, BranchesEndEachInTheirOwnWay) {
  FakeWorker* const decode = Decode();
  decode->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Tokens(2, "xx");
    call->Tokens(0, "ab STOP");
    call->Tokens(1, "cd", ferry::v1::FINISH_REASON_LENGTH);
    call->Tokens(0, "ignored");
    call->Tokens(2, "y\x01", ferry::v1::FINISH_REASON_STOP);
  };
  StartRouter();
  auto request = Text("go", 1000);
  request.mutable_sampling()->set_n(3);
  request.mutable_sampling()->add_stop("STOP");
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "ab ");
  EXPECT_EQ(answer.texts.at(1), "cd");
  EXPECT_EQ(answer.texts.at(2), "xxy") << "EOS has no text";
  EXPECT_EQ(answer.reasons.at(0), ferry::v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.reasons.at(1), ferry::v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.reasons.at(2), ferry::v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.summary.completion_tokens(), 7u + 2u + 4u);
  EXPECT_TRUE(decode->WaitFor([&] { return decode->cancels().size() == 1; }))
      << "the worker does not know that branch 0 is finished";
}

TEST_F(RouterFixture, LogprobsCarryTheTokensBytes) {
  Decode();
  StartRouter();
  auto request = Text("hi");
  request.mutable_sampling()->set_logprobs(2);
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  ASSERT_EQ(answer.logprobs.size(), 5u);
  EXPECT_EQ(answer.logprobs[1].chosen().token(), "e");
  EXPECT_EQ(answer.logprobs[1].chosen().logprob(), -0.5f);
  ASSERT_EQ(answer.logprobs[1].top_size(), 2);
  EXPECT_EQ(answer.logprobs[1].top(1).token(), "B");
  EXPECT_TRUE(Generate(Text("hi")).logprobs.empty());
}

TEST_F(RouterFixture, TwoModelsHaveTheirOwnWorkers) {
  models_ = {"m", "other"};
  FakeWorker* const first = Decode();
  FakeWorker* const second = Add({.role = ferry::v1::WORKER_ROLE_BOTH, .model = "other"});
  second->output = "second";
  StartRouter();
  auto request = Text("hi");
  request.set_model("other");
  EXPECT_EQ(Generate(request).texts[0], "second");
  request.set_model("m");
  EXPECT_EQ(Generate(request).texts[0], "hello");
  EXPECT_EQ(first->decodes().size(), 1u);
  request.set_model("");
  Answer answer = Generate(request);
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("m, other"));
  grpc::ClientContext context;
  ferry::v1::ListModelsResponse models;
  ASSERT_TRUE(stub_->ListModels(&context, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 2);
  EXPECT_EQ(models.models(1).name(), "other");
  EXPECT_EQ(models.models(1).max_model_len(), 4096u);
  EXPECT_EQ(models.models(1).vocab_size(), 300u);
  EXPECT_EQ(models.models(1).ready_prefill_workers(), 1u);
  EXPECT_EQ(models.models(0).ready_prefill_workers(), 0u);
  EXPECT_EQ(models.models(0).ready_decode_workers(), 1u);
  EXPECT_TRUE(models.models(1).ready());
  EXPECT_FALSE(models.models(0).ready());
  router_->StartDrain();
  grpc::ClientContext again;
  ASSERT_TRUE(stub_->ListModels(&again, {}, &models).ok());
  EXPECT_FALSE(models.models(1).ready());
}

TEST_F(RouterFixture, AWorkerWithAnotherHashSeedServesAndIsCounted) {
  FakeWorker* const decode = Add({.hash_seed = 5});
  Add({.role = ferry::v1::WORKER_ROLE_PREFILL});
  StartRouterAlone();
  ASSERT_TRUE(WaitForWorkers(1, 1));
  EXPECT_EQ(Generate(Tokens(200)).status, absl::OkStatus());
  EXPECT_TRUE(decode->kv_watch_starts().empty()) << "its events would name other blocks";
  const auto foreign = [this] {
    for (const auto& family : metrics_->Collect()) {
      if (family.name == "ferry_router_index_foreign_workers") return family.metric[0].gauge.value;
    }
    return -1.0;
  };
  EXPECT_TRUE(Eventually([&] { return foreign() == 1; }));
}

TEST_F(RouterFixture, AWorkerWithAnotherTokenizerGetsNothing) {
  Decode();
  FakeWorker* const odd = Add({.tokenizer_hash = "0123"});
  StartRouter();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Generate(Text("hi")).status, absl::OkStatus());
  EXPECT_TRUE(odd->decodes().empty());
}

TEST_F(RouterFixture, PromptsGoToTheWorkerThatHasAnnouncedTheirBlocks) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  FakeWorker* const decode = Decode();
  StartRouter();
  p2->Store(ChainOf(Tokens(2000)));
  ASSERT_TRUE(Eventually([&] { return router_->index().num_entries() == 31; }));
  for (int i = 0; i < 10; ++i) ASSERT_EQ(Generate(Tokens(2000)).status, absl::OkStatus());
  EXPECT_EQ(p2->prefills().size(), 10u);
  EXPECT_TRUE(p1->prefills().empty());
  auto salted = Tokens(2000, 1);
  salted.set_cache_salt("tenant");
  std::set<std::string> used;
  for (int i = 0; i < 100 && used.size() < 2; ++i) {
    salted.set_cache_salt(absl::StrCat("tenant ", i));
    used.insert(Generate(salted).summary.prefill_worker());
  }
  EXPECT_EQ(used.size(), 2u) << "another salt has no blocks anywhere";
  for (const size_t bytes : {127, 128, 255, 4096}) {  // their length is bytes of the namespace
    salted.set_cache_salt(std::string(bytes, 's'));
    EXPECT_EQ(Generate(salted).status, absl::OkStatus()) << bytes;
  }

  // A follow-up turn whose history lives on the decode worker is served there.
  decode->Store(ChainOf(Tokens(2000)));
  ASSERT_TRUE(Eventually([&] { return router_->index().num_entries() == 62; }));
  const Answer answer = Generate(Tokens(2010));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.prefill_worker(), decode->address());
}

TEST_F(RouterFixture, AnEqualPromptFollowsTheOneBeforeItIsAnnounced) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  Decode();
  StartRouter();
  for (int i = 0; i < 10; ++i) ASSERT_EQ(Generate(Tokens(2000)).status, absl::OkStatus());
  EXPECT_EQ(std::max(p1->prefills().size(), p2->prefills().size()), 10u);
}

TEST_F(RouterFixture, ABurstDoesNotHerdBeyondWhatItCosts) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  Add({.num_blocks = 10000});
  for (FakeWorker* worker : {p1, p2}) {
    // Nothing is accepted, so no report takes over what the ledger knows.
    worker->on_prefill = [](std::shared_ptr<fakes::PrefillCall>) {};
  }
  StartRouter();
  const auto opened = [&] { return p1->prefills().size() + p2->prefills().size(); };
  // 2000 tokens are 20 ms of work at these workers, and half of that with the common prefix: two
  // queued requests cost the third as much as computing all of its prompt at the other worker.
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (uint32_t i = 0; i < 20; ++i) {
    ferry::v1::GenerateRequest request = Tokens(2000);
    for (int t = 1024; t < 2000; ++t) {
      request.mutable_tokens()->set_ids(t, 50 + i + static_cast<uint32_t>(t) / 64);
    }
    calls.push_back(Start(request));
  }
  ASSERT_TRUE(p1->WaitFor([&] { return opened() == 20; }));
  EXPECT_GE(std::min(p1->prefills().size(), p2->prefills().size()), 4u);
  // Different prompts see the load that was charged a moment ago, although no report shows it.
  for (int i = 0; i < 20; ++i) calls.push_back(Start(Tokens(2000, 100 + i * 7)));
  ASSERT_TRUE(p1->WaitFor([&] { return opened() == 40; }));
  EXPECT_GE(std::min(p1->prefills().size(), p2->prefills().size()), 16u);
}

TEST_F(RouterFixture, DifferentPromptsAreSpreadOverEqualWorkers) {
  for (int i = 0; i < 4; ++i) Decode();
  StartRouter();
  for (int i = 0; i < 80; ++i)
    ASSERT_EQ(Generate(Text(absl::StrCat("prompt ", i))).status, absl::OkStatus());
  for (const auto& worker : workers_) EXPECT_GE(worker->decodes().size(), 8u);
}

TEST_F(RouterFixture, AFullDecodeWorkerDelaysAndDoesNotFail) {
  FakeWorker* const decode = Add({.num_blocks = 100});
  StartRouter();
  decode->SetLoad(0, 3, 99);
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(0).load().used_blocks == 99; }));
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 1; }));
  EXPECT_TRUE(decode->decodes().empty());
  decode->SetLoad(0, 0, 0);
  EXPECT_EQ(call->Wait().texts[0], "hello");
}

TEST_F(RouterFixture, ShortPromptsPassLongOnesThatWaitForAPrefillWorker) {
  FakeWorker* const prefill = Prefill();
  FakeWorker* const decode = Decode();
  StartRouter();
  prefill->SetLoad(1000000, 1, 0);  // ten seconds of work
  ASSERT_TRUE(
      Eventually([&] { return router_->registry().link(0).load().waiting_tokens == 1000000; }));
  const auto waits = Start(Tokens(2000));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 1; }));
  EXPECT_EQ(Generate(Text("short")).status, absl::OkStatus());
  EXPECT_TRUE(prefill->prefills().empty());
  EXPECT_EQ(decode->decodes().size(), 1u);
  prefill->SetLoad(0, 0, 0);
  EXPECT_EQ(waits->Wait().status, absl::OkStatus());
}

TEST_F(RouterFixture, WaitingRequestsGoByPriorityThenArrival) {
  FakeWorker* const decode = Add({.num_blocks = 100});
  StartRouter();
  decode->SetLoad(0, 3, 99);
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(0).load().used_blocks == 99; }));
  std::vector<std::unique_ptr<RunningCall>> calls;
  const auto enter = [&](const std::string& id, int priority) {
    auto request = Text("hi");
    request.set_request_id(id);
    request.set_priority(priority);
    calls.push_back(Start(request));
    const size_t count = calls.size();
    ASSERT_TRUE(Eventually([&] { return router_->num_running() == count; }));
  };
  enter("first", 0);
  enter("second", 0);
  enter("urgent", 5);
  decode->SetLoad(0, 3, 92);  // room for one of them at a time
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
  std::vector<std::string> order;
  for (const auto& sent : decode->decodes()) order.push_back(sent.spec().key().request_id());
  EXPECT_THAT(order, ElementsAre(StartsWith("urgent"), StartsWith("first"), StartsWith("second")));
}

TEST_F(RouterFixture, TokenizeAndDetokenize) {
  Decode();
  StartRouter();
  grpc::ClientContext context;
  ferry::v1::TokenizeRequest request;
  request.set_text("abc");
  ferry::v1::TokenizeResponse response;
  ASSERT_TRUE(stub_->Tokenize(&context, request, &response).ok());
  EXPECT_THAT(response.ids(), ElementsAre('a', 'b', 'c'));
  grpc::ClientContext long_context;
  request.set_text(std::string(200000, 'x'));
  ASSERT_TRUE(stub_->Tokenize(&long_context, request, &response).ok());
  EXPECT_EQ(response.ids_size(), 200000);
  grpc::ClientContext back_context;
  ferry::v1::DetokenizeRequest ids;
  ids.add_ids('o');
  ids.add_ids('k');
  ids.add_ids(0xff);
  ferry::v1::DetokenizeResponse text;
  ASSERT_TRUE(stub_->Detokenize(&back_context, ids, &text).ok());
  EXPECT_EQ(text.text(), "ok\xEF\xBF\xBD");
}

}  // namespace
}  // namespace router

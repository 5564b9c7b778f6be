// Every bad input has its status and a sentence that names the field and the value; none of them
// leaves anything behind.

#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/channel.h"
#include "grpcpp/create_channel.h"
#include "service/grpc_server.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using ferry::v1::GenerateRequest;
using testing::HasSubstr;

struct Case {
  const char* name;
  std::function<void(GenerateRequest*)> spoil;
  absl::StatusCode code;
  const char* words;
};

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

const Case kCases[] = {
    {"NoPrompt", [](auto* r) { r->clear_prompt(); }, kInvalid, "prompt is missing"},
    {"EmptyText", [](auto* r) { r->set_text(""); }, kInvalid, "prompt text is empty"},
    {"EmptyIds", [](auto* r) { r->mutable_tokens(); }, kInvalid, "prompt tokens.ids is empty"},
    {"IdOutOfRange", [](auto* r) { r->mutable_tokens()->add_ids(300); }, kInvalid,
     "prompt tokens.ids[0] is 300: must be below the vocabulary size, 300"},
    {"InvalidUtf8", [](auto* r) { r->set_text("abc\xFF"); }, kInvalid,
     "text is not valid UTF-8 at byte 3"},
    {"InvalidUtf8InStop", [](auto* r) { r->mutable_sampling()->add_stop(std::string("\xC0\x80")); },
     kInvalid, "sampling.stop is not valid UTF-8 at byte 0"},
    {"OverlongPrompt", [](auto* r) { r->set_text(std::string(5000, 'x')); }, kInvalid,
     "prompt has 5000 tokens: the context is 4096"},
    {"HugePrompt", [](auto* r) { r->set_text(std::string(1 << 20, 'x')); }, kInvalid,
     "prompt text has 1048576 bytes: more than the context of 4096 tokens can hold"},
    {"BeyondTheContext",
     [](auto* r) {
       r->set_text(std::string(4000, 'x'));
       r->mutable_sampling()->set_max_tokens(97);
     },
     kInvalid, "sampling.max_tokens is 97: with a prompt of 4000 tokens the context of 4096"},
    {"UnknownModel", [](auto* r) { r->set_model("nobody"); }, absl::StatusCode::kNotFound,
     "model \"nobody\" is not served here; served: m"},
    {"NegativeTemperature", [](auto* r) { r->mutable_sampling()->set_temperature(-1); }, kInvalid,
     "sampling.temperature is -1: must be a finite number >= 0"},
    {"NanTemperature", [](auto* r) { r->mutable_sampling()->set_temperature(std::nanf("")); },
     kInvalid, "sampling.temperature is nan"},
    {"InfiniteTemperature",
     [](auto* r) {
       r->mutable_sampling()->set_temperature(std::numeric_limits<float>::infinity());
     },
     kInvalid, "sampling.temperature is inf"},
    {"ZeroTopP", [](auto* r) { r->mutable_sampling()->set_top_p(0); }, kInvalid,
     "sampling.top_p is 0: must be in (0, 1]"},
    {"LargeTopP", [](auto* r) { r->mutable_sampling()->set_top_p(1.5f); }, kInvalid,
     "sampling.top_p is 1.5"},
    {"NanTopP", [](auto* r) { r->mutable_sampling()->set_top_p(std::nanf("")); }, kInvalid,
     "sampling.top_p is nan"},
    {"NegativeTopK", [](auto* r) { r->mutable_sampling()->set_top_k(-2); }, kInvalid,
     "sampling.top_k is -2"},
    {"LargeMinP", [](auto* r) { r->mutable_sampling()->set_min_p(2); }, kInvalid,
     "sampling.min_p is 2"},
    {"ZeroRepetitionPenalty", [](auto* r) { r->mutable_sampling()->set_repetition_penalty(0); },
     kInvalid, "sampling.repetition_penalty is 0"},
    {"LargePresencePenalty", [](auto* r) { r->mutable_sampling()->set_presence_penalty(3); },
     kInvalid, "sampling.presence_penalty is 3"},
    {"NanFrequencyPenalty",
     [](auto* r) { r->mutable_sampling()->set_frequency_penalty(std::nanf("")); }, kInvalid,
     "sampling.frequency_penalty is nan"},
    {"NoOutput", [](auto* r) { r->mutable_sampling()->set_max_tokens(0); }, kInvalid,
     "sampling.max_tokens is 0: must be >= 1"},
    {"MinAboveMax", [](auto* r) { r->mutable_sampling()->set_min_tokens(17); }, kInvalid,
     "sampling.min_tokens is 17: must be <= max_tokens, 16"},
    {"NoBranch", [](auto* r) { r->mutable_sampling()->set_n(0); }, kInvalid,
     "sampling.n is 0: must be in 1..16"},
    {"ManyBranches", [](auto* r) { r->mutable_sampling()->set_n(17); }, kInvalid,
     "sampling.n is 17"},
    {"ManyLogprobs", [](auto* r) { r->mutable_sampling()->set_logprobs(21); }, kInvalid,
     "sampling.logprobs is 21: must be in 0..20"},
    {"ManyStops",
     [](auto* r) {
       for (int i = 0; i < 17; ++i) r->mutable_sampling()->add_stop(std::string("x"));
     },
     kInvalid, "sampling.stop has 17 strings: at most 16"},
    {"EmptyStop",
     [](auto* r) {
       r->mutable_sampling()->add_stop(std::string("x"));
       r->mutable_sampling()->add_stop(std::string(""));
     },
     kInvalid, "sampling.stop[1] is empty"},
    {"LongStop", [](auto* r) { r->mutable_sampling()->add_stop(std::string(4097, 'x')); }, kInvalid,
     "sampling.stop[0] has 4097 bytes: at most 4096"},
    {"LongSalt", [](auto* r) { r->set_cache_salt(std::string(4097, 'x')); }, kInvalid,
     "cache_salt has 4097 bytes: at most 4096"},
    {"ManyStopIds",
     [](auto* r) {
       for (int i = 0; i < 65; ++i) r->mutable_sampling()->add_stop_token_ids(1);
     },
     kInvalid, "sampling.stop_token_ids has 65 ids: at most 64"},
    {"StopIdOutOfRange", [](auto* r) { r->mutable_sampling()->add_stop_token_ids(300); }, kInvalid,
     "sampling.stop_token_ids[0] is 300"},
    {"LongRequestId", [](auto* r) { r->set_request_id(std::string(129, 'x')); }, kInvalid,
     "request_id has 129 characters: at most 128"},
    {"RequestIdWithNewline", [](auto* r) { r->set_request_id("a\nb"); }, kInvalid,
     "request_id \"a\\nb\" has a character that is not printable ASCII"},
};

TEST_F(RouterFixture, BadInputHasItsStatusAndSentence) {
  fakes::FakeWorker* const decode = Decode();
  StartRouter();
  for (const Case& bad : kCases) {
    SCOPED_TRACE(bad.name);
    GenerateRequest request = Text("a good prompt");
    bad.spoil(&request);
    const Answer answer = Generate(request);
    EXPECT_EQ(answer.status.code(), bad.code) << answer.status;
    EXPECT_THAT(std::string(answer.status.message()), HasSubstr(bad.words));
    EXPECT_EQ(answer.num_summaries, 0);
    EXPECT_TRUE(answer.texts.empty());
  }
  EXPECT_TRUE(decode->decodes().empty());
  EXPECT_EQ(Generate(Text("a good prompt")).status, absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, LimitsThemselvesAreAllowed) {
  fakes::FakeWorker* const decode = Add(ferry::v1::WORKER_ROLE_BOTH);
  StartRouter();
  GenerateRequest request = Text("x");
  request.set_request_id(std::string(128, '~'));
  ferry::v1::SamplingParams* sampling = request.mutable_sampling();
  sampling->set_temperature(0);
  sampling->set_top_k(-1);
  sampling->set_top_p(1);
  sampling->set_min_p(1);
  sampling->set_presence_penalty(-2);
  sampling->set_frequency_penalty(2);
  sampling->set_min_tokens(16);
  sampling->set_logprobs(20);
  for (int i = 0; i < 16; ++i) sampling->add_stop(std::string("never"));
  for (int i = 0; i < 64; ++i) sampling->add_stop_token_ids(i + 200);
  sampling->set_ignore_eos(true);
  ASSERT_EQ(Generate(request).status, absl::OkStatus());
  const auto resolved = decode->decodes()[0].spec().sampling();
  EXPECT_EQ(resolved.top_k(), 0) << "all";
  EXPECT_EQ(resolved.repetition_penalty(), 1);
  EXPECT_EQ(resolved.stop_token_ids_size(), 64) << "EOS is ignored";
  request = Text(std::string(4080, 'x'));
  EXPECT_EQ(Generate(request).status, absl::OkStatus()) << "prompt + max_tokens fill the context";
  request = Text(std::string(4095, 'x'));
  request.mutable_sampling()->clear_max_tokens();
  EXPECT_EQ(Generate(request).status, absl::OkStatus());
  EXPECT_EQ(decode->decodes()[2].spec().sampling().max_tokens(), 1u);
}

TEST_F(RouterFixture, WithoutMaxTokensTheOutputIsWhatFits) {
  fakes::FakeWorker* const decode = Decode();
  StartRouter();
  GenerateRequest request = Text("four");
  request.clear_sampling();
  ASSERT_EQ(Generate(request).status, absl::OkStatus());
  const auto resolved = decode->decodes()[0].spec().sampling();
  EXPECT_EQ(resolved.max_tokens(), 4092u);
  EXPECT_EQ(resolved.temperature(), 1);
  EXPECT_EQ(resolved.top_p(), 1);
  EXPECT_EQ(resolved.n(), 1u);
  EXPECT_EQ(resolved.num_logprobs(), -1);
}

TEST_F(RouterFixture, AMessageOverTheLimitIsRefused) {
  Decode();
  StartRouter();
  // Not through the client's own limit.
  grpc::ChannelArguments arguments;
  const auto stub = ferry::v1::Inference::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials(), arguments));
  GenerateRequest request;
  request.set_text(std::string(service::kMaxMessageBytes + 1000, 'x'));
  grpc::ClientContext context;
  const auto reader = stub->Generate(&context, request);
  ferry::v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(Generate(Text("next")).status, absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, AMessageThatIsNoRequestIsRefused) {
  Decode();
  StartRouter();
  grpc::ClientContext context;
  ferry::v1::TokenizeRequest request;
  request.set_text("bad \xED\xA0\x80");
  ferry::v1::TokenizeResponse response;
  const grpc::Status status = stub_->Tokenize(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "text is not valid UTF-8 at byte 4");
  grpc::ClientContext detokenize;
  ferry::v1::DetokenizeRequest ids;
  ids.add_ids(256);
  ferry::v1::DetokenizeResponse text;
  EXPECT_EQ(stub_->Detokenize(&detokenize, ids, &text).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(RouterFixture, ARequestIdIsFreeAgainAfterItsRequestHasEnded) {
  fakes::FakeWorker* const decode = Decode();
  std::shared_ptr<fakes::DecodeCall> open;
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    open = call;
  };
  StartRouter();
  GenerateRequest request = Text("x");
  request.set_request_id("same");
  const auto first = Start(request);
  ASSERT_TRUE(decode->WaitFor([&] { return decode->decodes().size() == 1; }));
  const Answer second = Generate(request);
  EXPECT_EQ(second.status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status.message()), HasSubstr("same"));
  open->Answer("done");
  EXPECT_EQ(first->Wait().texts[0], "done");
  decode->on_decode = nullptr;
  EXPECT_EQ(Generate(request).status, absl::OkStatus());
}

TEST_F(RouterFixture, AFullQueueRefusesAtOnce) {
  options_.max_queue = 2;
  fakes::FakeWorker* const decode = Add({.num_blocks = 100});
  StartRouter();
  decode->SetLoad(0, 3, 99);
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(0).load().used_blocks == 99; }));
  const auto a = Start(Text("a"));
  const auto b = Start(Text("b"));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 2; }));
  const Answer answer = Generate(Text("c"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(answer.status), status::kQueueFull);
  decode->SetLoad(0, 0, 0);
  EXPECT_EQ(a->Wait().status, absl::OkStatus());
  EXPECT_EQ(b->Wait().status, absl::OkStatus());
}

}  // namespace
}  // namespace router

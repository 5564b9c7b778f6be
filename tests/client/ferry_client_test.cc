#include "client/ferry_client.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"
#include "status/grpc_status.h"

namespace ferry {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;

// Answers as a router does; the prompt's text chooses what happens.
class FakeInference final : public ferry::v1::Inference::Service {
 public:
  grpc::Status Generate(grpc::ServerContext* context, const GenerateRequest* request,
                        grpc::ServerWriter<GenerateResponse>* writer) override {
    ++num_calls_;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      peers_.insert(context->peer());
    }
    if (num_unavailable_.fetch_sub(1) > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "no worker");
    }
    if (request->text() == "cut off" && num_calls_ == 1) return grpc::Status::CANCELLED;
    if (request->text() == "dies") {
      GenerateResponse response;
      response.set_text("first");
      writer->Write(response);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the worker died");
    }
    if (request->text() == "full") {
      return status::ToGrpc(status::WithRetryAfter(
          status::WithReason(absl::ResourceExhaustedError("queue full"), status::kQueueFull),
          absl::Milliseconds(2500)));
    }
    const bool endless = request->text() == "endless";
    for (uint32_t i = 0; endless || i < 3; ++i) {
      if (context->IsCancelled()) break;
      for (uint32_t branch = 0; branch < 2; ++branch) {
        GenerateResponse response;
        response.set_index(branch);
        response.set_text(absl::StrCat(branch, ":", i, " "));
        response.add_token_ids(10 * branch + i);
        if (i == 2 && !endless) response.set_finish_reason(ferry::v1::FINISH_REASON_LENGTH);
        if (!writer->Write(response)) break;
      }
    }
    if (endless) {
      const std::lock_guard<std::mutex> lock(mutex_);
      saw_cancellation_ = context->IsCancelled();
      return grpc::Status::CANCELLED;
    }
    if (request->text() == "half") return grpc::Status::OK;
    GenerateResponse last;
    last.mutable_summary()->set_request_id(request->request_id());
    last.mutable_summary()->set_completion_tokens(6);
    writer->Write(last);
    return grpc::Status::OK;
  }
  grpc::Status Tokenize(grpc::ServerContext*, const ferry::v1::TokenizeRequest* request,
                        ferry::v1::TokenizeResponse* response) override {
    if (num_unavailable_.fetch_sub(1) > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "no worker");
    }
    if (request->model() != "m") return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such model");
    if (request->add_special_tokens()) response->add_ids(0);
    for (const char c : request->text()) response->add_ids(static_cast<uint8_t>(c));
    return grpc::Status::OK;
  }
  grpc::Status Detokenize(grpc::ServerContext*, const ferry::v1::DetokenizeRequest* request,
                          ferry::v1::DetokenizeResponse* response) override {
    for (const uint32_t id : request->ids()) {
      response->mutable_text()->push_back(static_cast<char>(id));
    }
    return grpc::Status::OK;
  }
  grpc::Status ListModels(grpc::ServerContext*, const ferry::v1::ListModelsRequest*,
                          ferry::v1::ListModelsResponse* response) override {
    ferry::v1::ModelCard* card = response->add_models();
    card->set_name("m");
    card->set_ready_prefill_workers(no_prefill_ ? 0 : 1);
    // Ready from the third question on.
    card->set_ready(++num_lists_ > 2 && !never_ready_);
    card->set_ready_decode_workers(card->ready() ? 1 : 0);
    if (misfits_) response->add_misfits("a and b do not fit");
    if (never_ready_) response->add_unreachable("c does not answer");
    return grpc::Status::OK;
  }

  bool saw_cancellation() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return saw_cancellation_;
  }
  size_t num_peers() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peers_.size();
  }
  std::atomic<bool> never_ready_{false};
  std::atomic<bool> no_prefill_{false};
  std::atomic<bool> misfits_{false};
  std::atomic<int> num_unavailable_{0};  // so many calls fail before one is answered
  std::atomic<int> num_calls_{0};        // of Generate

 private:
  std::atomic<int> num_lists_{0};
  std::mutex mutex_;  // guards the fields below
  bool saw_cancellation_ = false;
  std::set<std::string> peers_;  // addresses that Generate was called from
};

class FerryClientTest : public testing::Test {
 protected:
  void SetUp() override {
    auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {&inference_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    client_ = NewClient({});
    ASSERT_NE(client_, nullptr);
  }
  std::unique_ptr<Client> NewClient(ClientOptions options) const {
    options.address = absl::StrCat("127.0.0.1:", server_->port());
    options.timeout = std::min(options.timeout, absl::Seconds(60));
    options.first_backoff = absl::Milliseconds(2);
    auto client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }
  static GenerateRequest Request(const std::string& text) {
    GenerateRequest request;
    request.set_text(text);
    request.set_request_id("r1");
    return request;
  }

  FakeInference inference_;
  std::unique_ptr<service::GrpcServer> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(FerryClientTest, GenerateGivesEveryMessage) {
  std::vector<std::string> texts;
  int num_summaries = 0;
  const absl::Status status =
      client_->Generate(Request("go"), [&](const GenerateResponse& response) {
        if (response.has_summary()) ++num_summaries;
        if (!response.text().empty()) texts.push_back(response.text());
        return true;
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(texts, (std::vector<std::string>{"0:0 ", "1:0 ", "0:1 ", "1:1 ", "0:2 ", "1:2 "}));
  EXPECT_EQ(num_summaries, 1);
}

TEST_F(FerryClientTest, CompleteJoinsBranchZero) {
  const auto completion = client_->Complete(Request("go"));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(completion->text, "0:0 0:1 0:2 ");
  EXPECT_EQ(completion->token_ids, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(completion->finish_reason, ferry::v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(completion->summary.request_id(), "r1");
  EXPECT_EQ(completion->summary.completion_tokens(), 6u);
}

TEST_F(FerryClientTest, ErrorsKeepCodeMessageAndReason) {
  const auto completion = client_->Complete(Request("full"));
  EXPECT_EQ(completion.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(completion.status().message(), "queue full");
  EXPECT_EQ(status::Reason(completion.status()), status::kQueueFull);
  EXPECT_EQ(RetryAfter(completion.status()), absl::Milliseconds(2500));
  EXPECT_EQ(RetryAfter(absl::UnavailableError("away")), absl::ZeroDuration());
}

TEST_F(FerryClientTest, AStreamWithoutSummaryIsAnError) {
  EXPECT_EQ(client_->Complete(Request("half")).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(FerryClientTest, ReturningFalseCancels) {
  int num_messages = 0;
  const absl::Status status = client_->Generate(
      Request("endless"), [&](const GenerateResponse&) { return ++num_messages < 5; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(num_messages, 5);
  server_->Shutdown(absl::Seconds(10));  // waits for the handler
  EXPECT_TRUE(inference_.saw_cancellation());
}

TEST_F(FerryClientTest, TimeoutEndsAGeneration) {
  const auto hasty = NewClient({.timeout = absl::Milliseconds(200)});
  EXPECT_EQ(hasty->Complete(Request("endless")).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(
      client_->Complete(Request("endless"), {.timeout = absl::Milliseconds(200)}).status().code(),
      absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(hasty->Complete(Request("go"), {.timeout = absl::Seconds(60)}).ok());
}

TEST_F(FerryClientTest, StartGivesEveryMessageAndThenTheEnd) {
  std::string text;
  int num_ends = 0;
  const auto running = client_->Start(
      Request("go"),
      [&](const GenerateResponse& response) {
        EXPECT_EQ(num_ends, 0);
        text += response.text();
        return true;
      },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        ++num_ends;
      });
  EXPECT_TRUE(running->Wait().ok());
  EXPECT_EQ(text, "0:0 1:0 0:1 1:1 0:2 1:2 ");
  EXPECT_EQ(num_ends, 1);
  running->Cancel();  // too late: the end stays
  EXPECT_TRUE(running->Wait().ok());
}

TEST_F(FerryClientTest, WhatWasStartedCanBeCancelledFromAnywhere) {
  const auto ignore = [](const GenerateResponse&) { return true; };
  absl::Status end;
  const auto keep_end = [&](const absl::Status& status) { end = status; };
  auto running = client_->Start(Request("endless"), ignore, keep_end);
  running->Cancel();
  EXPECT_EQ(running->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled);

  // By its first message.
  running = client_->Start(
      Request("endless"), [](const GenerateResponse&) { return false; }, keep_end);
  EXPECT_EQ(running->Wait().message(), "the caller cancelled the generation");

  // By letting it go; it may outlive its client.
  running = client_->Start(Request("endless"), ignore, keep_end);
  client_.reset();
  end = absl::OkStatus();
  running.reset();
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled);
}

TEST_F(FerryClientTest, AStartedGenerationKeepsItsTimeout) {
  const auto running = client_->Start(
      Request("endless"), [](const GenerateResponse&) { return true; }, [](const absl::Status&) {},
      {.timeout = absl::Milliseconds(200)});
  EXPECT_EQ(running->Wait().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(FerryClientTest, UnavailableIsTriedAgain) {
  inference_.num_unavailable_ = 2;
  const auto completion = client_->Complete(Request("go"));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(completion->text, "0:0 0:1 0:2 ");
  EXPECT_EQ(inference_.num_calls_, 3);
  inference_.num_unavailable_ = 2;
  EXPECT_TRUE(client_->Tokenize("m", "ab", true).ok());
  inference_.num_unavailable_ = 2;
  const auto running = client_->Start(
      Request("go"), [](const GenerateResponse&) { return true; }, [](const absl::Status&) {});
  EXPECT_TRUE(running->Wait().ok());
  EXPECT_EQ(inference_.num_calls_, 6);
}

TEST_F(FerryClientTest, WhatAnEndingRouterCutsOffIsTriedAgain) {
  EXPECT_TRUE(client_->Complete(Request("cut off")).ok());
  EXPECT_EQ(inference_.num_calls_, 2);
}

TEST_F(FerryClientTest, ALongPromptIsTriedAgainToo) {
  inference_.num_unavailable_ = 2;
  GenerateRequest request;
  for (uint32_t i = 0; i < 1'000'000; ++i) request.mutable_tokens()->add_ids(i);
  EXPECT_TRUE(client_->Complete(request).ok());
  EXPECT_EQ(inference_.num_calls_, 3);
}

TEST_F(FerryClientTest, AttemptsAreBounded) {
  inference_.num_unavailable_ = 1000;
  EXPECT_EQ(client_->Complete(Request("go")).status(), absl::UnavailableError("no worker"));
  EXPECT_EQ(inference_.num_calls_, 3);
  EXPECT_EQ(NewClient({.max_attempts = 5})->Complete(Request("go")).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(inference_.num_calls_, 8);
  EXPECT_EQ(NewClient({.max_attempts = 1})->Complete(Request("go")).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(inference_.num_calls_, 9);
}

TEST_F(FerryClientTest, NothingIsTriedAgainAfterAMessageOrAnotherError) {
  std::string text;
  const absl::Status status = client_->Generate(Request("dies"), [&](const auto& response) {
    text += response.text();
    return true;
  });
  EXPECT_EQ(status, absl::UnavailableError("the worker died"));
  EXPECT_EQ(text, "first");
  EXPECT_EQ(inference_.num_calls_, 1);
  EXPECT_EQ(client_->Complete(Request("full")).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(inference_.num_calls_, 2);
}

TEST_F(FerryClientTest, CallsShareOneConnection) {
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(client_->Complete(Request("go")).ok());
  EXPECT_EQ(inference_.num_peers(), 1u);
  EXPECT_TRUE(NewClient({})->Complete(Request("go")).ok());
  EXPECT_EQ(inference_.num_peers(), 2u) << "another client has its own";
}

TEST_F(FerryClientTest, TokenizeAndDetokenize) {
  EXPECT_EQ(*client_->Tokenize("m", "ab", true), (std::vector<uint32_t>{0, 'a', 'b'}));
  EXPECT_EQ(*client_->Detokenize("m", {'a', 'b'}), "ab");
  EXPECT_EQ(client_->Tokenize("x", "ab", true).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FerryClientTest, WaitsUntilBothKindsOfWorkersAreReady) {
  EXPECT_TRUE(client_->WaitUntilReady("m", absl::Seconds(20)).ok());
  EXPECT_EQ((*client_->ListModels())[0].ready_decode_workers(), 1u);
  EXPECT_TRUE(client_->WaitUntilReady("", absl::Seconds(20)).ok());
}

// Whether prompts need a prefill worker is for the router to say.
TEST_F(FerryClientTest, ReadyIsWhatTheRouterCallsReady) {
  inference_.no_prefill_ = true;
  EXPECT_EQ(client_->WaitUntilReady("m", absl::Seconds(20)), absl::OkStatus());
}

TEST_F(FerryClientTest, WaitSaysWhatIsMissing) {
  inference_.never_ready_ = true;
  EXPECT_EQ(client_->WaitUntilReady("m", absl::Milliseconds(200)).message(),
            "not ready after 200ms: m has 1 prefill and 0 decode workers ready; c does not answer");
  EXPECT_EQ(
      client_->WaitUntilReady("x", absl::Milliseconds(200)).message(),
      "not ready after 200ms: the router does not serve model x, it serves m; c does not answer");
}

TEST_F(FerryClientTest, OneQuestionTellsWhatMayPassFromWhatWillNot) {
  inference_.never_ready_ = true;
  EXPECT_EQ(client_->CheckReady("m", absl::Seconds(20)).code(), absl::StatusCode::kUnavailable);
  inference_.misfits_ = true;
  EXPECT_EQ(client_->CheckReady("m", absl::Seconds(20)),
            absl::FailedPreconditionError("m has 1 prefill and 0 decode workers ready; a and b do "
                                          "not fit; c does not answer"));
  inference_.never_ready_ = false;
  EXPECT_EQ(client_->CheckReady("m", absl::Seconds(20)), absl::OkStatus()) << "others fit";
}

TEST_F(FerryClientTest, ThreadsShareOneClient) {
  std::vector<std::thread> threads;
  std::atomic<int> num_good{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto completion = client_->Complete(Request("go"));
      if (completion.ok() && completion->text == "0:0 0:1 0:2 ") ++num_good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_good, 8);
}

TEST(FerryClientWithoutServerTest, NobodyListens) {
  const auto client = Client::Create({.address = "127.0.0.1:1", .timeout = absl::Seconds(20)});
  ASSERT_TRUE(client.ok());
  EXPECT_EQ((*client)->ListModels().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ((*client)->WaitUntilReady("", absl::Milliseconds(300)).message(),
            "not ready after 300ms: the router does not answer");
}

// What a worker is to a client: a server without the service.
TEST(FerryClientWithoutServerTest, AServerThatIsNoRouterIsNamed) {
  const auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = absl::StrCat("127.0.0.1:", (*server)->port());
  const auto client = Client::Create({.address = address});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto error = [&](const char* method) {
    return absl::UnimplementedError(absl::StrCat(address,
                                                 " is no router: it does not serve Inference.",
                                                 method, "; give the router's address"));
  };
  const auto on_message = [](const GenerateResponse&) { return true; };
  EXPECT_EQ((*client)->Generate({}, on_message), error("Generate"));
  EXPECT_EQ((*client)->Start({}, on_message, [](const absl::Status&) {})->Wait(),
            error("Generate"));
  EXPECT_EQ((*client)->Tokenize("m", "x", true).status(), error("Tokenize"));
  EXPECT_EQ((*client)->Detokenize("m", {1}).status(), error("Detokenize"));
  EXPECT_EQ((*client)->ListModels().status(), error("ListModels"));
  EXPECT_EQ((*client)->WaitUntilReady("", absl::Hours(1)), error("ListModels"));
}

TEST(FerryClientWithoutServerTest, OptionsOutOfRange) {
  const auto said = [](const ClientOptions& options) {
    return std::string(Client::Create(options).status().message());
  };
  EXPECT_EQ(said({}), "address is empty");
  EXPECT_EQ(said({.address = "a:1", .max_attempts = 0}), "max_attempts is 0, it must be 1 to 5");
  EXPECT_EQ(said({.address = "a:1", .max_attempts = 6}), "max_attempts is 6, it must be 1 to 5");
  EXPECT_EQ(said({.address = "a:1", .first_backoff = absl::ZeroDuration()}),
            "first_backoff is 0, it must be 1ms to 10s");
  EXPECT_EQ(said({.address = "a:1", .first_backoff = absl::Seconds(11)}),
            "first_backoff is 11s, it must be 1ms to 10s");
}

TEST(FerryClientWithoutServerTest, UnreadableTlsFiles) {
  EXPECT_EQ(Client::Create({.address = "a:1", .tls_ca_file = "/nowhere"}).status().message(),
            "tls file: no such file: /nowhere");
  EXPECT_EQ(Client::Create({.address = "a:1", .tls_cert_file = "/x"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry

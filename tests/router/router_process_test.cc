// ferry-router as a process: how it starts, what it says when it cannot, and how it ends.

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"
#include "tests/fakes/fake_worker.h"
#include "tests/fakes/program.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router {
namespace {

using testing::HasSubstr;

fakes::Program Router(std::vector<std::string> arguments) {
  return fakes::Program("ferry-router", std::move(arguments));
}

// The line that says so may come after "ready".
int Port(fakes::Program& process) {
  constexpr char kServing[] = " serving role=router address=127.0.0.1:";
  return process.ReadUntil(kServing) && process.ReadUntil(" metrics_port=")
             ? process.Number(kServing)
             : -1;
}

class RouterProcessTest : public testing::Test {
 protected:
  RouterProcessTest() {
    assets_.Write("config.json", R"({"vocab_size": 300, "max_position_embeddings": 4096})");
    assets_.Write("tokenizer.json", tokenizer::TinyTokenizer().dump());
  }
  std::vector<std::string> Flags(const std::string& workers,
                                 const std::string& listen = "127.0.0.1:0") {
    return {"--listen=" + listen, "--metrics_listen=127.0.0.1:0",
            "--model_assets=m=" + assets_.path(), "--workers=" + workers};
  }
  tokenizer::TempDir assets_;
  fakes::FakeWorker::Directory directory_;
};

TEST_F(RouterProcessTest, SigtermLetsRunningRequestsFinishAndExitsWithZero) {
  fakes::FakeWorker worker({.role = ferry::v1::WORKER_ROLE_BOTH}, &directory_);
  std::shared_ptr<fakes::DecodeCall> open;
  worker.on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  fakes::Program process = Router(Flags(worker.address()));
  ASSERT_TRUE(process.ReadUntil("process=ferry-router ready\n"));
  const auto stub = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", Port(process)), {}));
  grpc::ClientContext context;
  ferry::v1::GenerateRequest request;
  request.set_text("hi");
  const auto reader = stub->Generate(&context, request);
  ferry::v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  process.Signal(SIGTERM);
  ASSERT_TRUE(process.ReadUntil("draining signal="));
  grpc::ClientContext late_context;
  const auto late = stub->Generate(&late_context, request);
  EXPECT_FALSE(late->Read(&message));
  // CANCELLED before the client has heard that it is to go elsewhere.
  EXPECT_THAT(late->Finish().error_code(), ::testing::AnyOf(grpc::UNAVAILABLE, grpc::CANCELLED));
  open->Answer("b");
  std::string text;
  while (reader->Read(&message)) text += message.text();
  EXPECT_EQ(text, "b");
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(process.Wait(), 0) << process.said();
  EXPECT_THAT(process.said(), HasSubstr("process=ferry-router stopped\n"));
}

TEST_F(RouterProcessTest, TheDrainLimitEndsWhatStillRuns) {
  fakes::FakeWorker worker({.role = ferry::v1::WORKER_ROLE_BOTH}, &directory_);
  worker.on_decode = [](std::shared_ptr<fakes::DecodeCall> call) { call->Accept(); };
  auto flags = Flags(worker.address());
  flags.push_back("--drain_limit_s=0.1");
  fakes::Program process = Router(flags);
  ASSERT_TRUE(process.ReadUntil("process=ferry-router ready\n"));
  const auto stub = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", Port(process)), {}));
  grpc::ClientContext context;
  ferry::v1::GenerateRequest request;
  request.set_text("hi");
  const auto reader = stub->Generate(&context, request);
  ASSERT_TRUE(worker.WaitFor([&] { return worker.decodes().size() == 1; }));
  process.Signal(SIGINT);
  ferry::v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
  EXPECT_EQ(process.Wait(), 0) << process.said();
}

TEST_F(RouterProcessTest, ASecondSignalEndsWhatStillRuns) {
  fakes::FakeWorker worker({.role = ferry::v1::WORKER_ROLE_BOTH}, &directory_);
  worker.on_decode = [](std::shared_ptr<fakes::DecodeCall> call) { call->Accept(); };
  fakes::Program process = Router(Flags(worker.address()));  // its drain limit is two minutes
  ASSERT_TRUE(process.ReadUntil("process=ferry-router ready\n"));
  const auto stub = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", Port(process)), {}));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  ferry::v1::GenerateRequest request;
  request.set_text("hi");
  const auto reader = stub->Generate(&context, request);
  ASSERT_TRUE(worker.WaitFor([&] { return worker.decodes().size() == 1; }));
  process.Signal(SIGTERM);
  ASSERT_TRUE(process.ReadUntil("draining signal="));
  process.Signal(SIGTERM);
  ferry::v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(process.Wait(), 0) << process.said();
}

TEST_F(RouterProcessTest, WhatIsWrongAtTheStartIsOneSentence) {
  const auto listening = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(listening.ok());
  const std::string taken = absl::StrCat("127.0.0.1:", (*listening)->port());
  fakes::Program in_use = Router(Flags("127.0.0.1:1", taken));
  EXPECT_EQ(in_use.Wait(), 1);
  EXPECT_THAT(in_use.said(), HasSubstr("ferry-router: cannot listen on " + taken));

  fakes::Program no_assets = Router({"--model_assets=/nowhere/at/all", "--workers=127.0.0.1:1"});
  EXPECT_EQ(no_assets.Wait(), 1);
  EXPECT_THAT(no_assets.said(),
              HasSubstr("ferry-router: model assets /nowhere/at/all is not a directory"));

  fakes::Program no_workers = Router({"--model_assets=" + assets_.path()});
  EXPECT_EQ(no_workers.Wait(), 1);
  EXPECT_THAT(no_workers.said(), HasSubstr("ferry-router: --workers is missing"));

  assets_.Write("config.json", "{}");
  fakes::Program bad_config = Router(Flags("127.0.0.1:1"));
  EXPECT_EQ(bad_config.Wait(), 1);
  EXPECT_THAT(bad_config.said(), HasSubstr("config.json: vocab_size is missing"));
}

}  // namespace
}  // namespace router

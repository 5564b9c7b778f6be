// ferry-router as a process: how it starts, what it says when it cannot, and how it ends.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

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
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router {
namespace {

using testing::HasSubstr;

// One run of the program; its stderr comes through a pipe.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     absl::StrCat(std::getenv("FERRY_BIN_DIR"), "/ferry-router"));
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    stderr_ = ends[0];
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(stderr_);
  }
  void Signal(int number) { kill(pid_, number); }
  // Reads until `words` have been said; false if the process ends before.
  bool ReadUntil(const std::string& words) {
    char buffer[4096];
    while (said_.find(words) == std::string::npos) {
      const ssize_t n = read(stderr_, buffer, sizeof(buffer));
      if (n <= 0) return false;
      said_.append(buffer, n);
    }
    return true;
  }
  // Waits for its end; the exit code, or -1 for a signal.
  int Wait() {
    ReadUntil("no process says this");
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  const std::string& said() const { return said_; }
  // The number behind `name` in what was said.
  int Number(const std::string& name) const {
    const size_t at = said_.find(name);
    return at == std::string::npos ? -1 : std::atoi(said_.c_str() + at + name.size());
  }

 private:
  pid_t pid_ = -1;
  int stderr_ = -1;
  std::string said_;
};

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
  fakes::FakeWorker worker({}, &directory_);
  std::shared_ptr<fakes::DecodeCall> open;
  worker.on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  Process process(Flags(worker.address()));
  ASSERT_TRUE(process.ReadUntil("listening=true port="));
  ASSERT_TRUE(process.ReadUntil("ready=true"));
  const auto stub = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", process.Number("listening=true port=")), {}));
  grpc::ClientContext context;
  ferry::v1::GenerateRequest request;
  request.set_text("hi");
  const auto reader = stub->Generate(&context, request);
  ferry::v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  process.Signal(SIGTERM);
  ASSERT_TRUE(process.ReadUntil("stopping=true"));
  grpc::ClientContext late_context;
  const auto late = stub->Generate(&late_context, request);
  EXPECT_FALSE(late->Read(&message));
  EXPECT_EQ(late->Finish().error_code(), grpc::UNAVAILABLE);
  open->Answer("b");
  std::string text;
  while (reader->Read(&message)) text += message.text();
  EXPECT_EQ(text, "b");
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(process.Wait(), 0) << process.said();
  EXPECT_THAT(process.said(), HasSubstr("stopped=true"));
}

TEST_F(RouterProcessTest, TheDrainLimitEndsWhatStillRuns) {
  fakes::FakeWorker worker({}, &directory_);
  worker.on_decode = [](std::shared_ptr<fakes::DecodeCall> call) { call->Accept(); };
  auto flags = Flags(worker.address());
  flags.push_back("--drain_limit_s=0.1");
  Process process(flags);
  ASSERT_TRUE(process.ReadUntil("ready=true"));
  ASSERT_TRUE(process.ReadUntil("listening=true port="));
  const auto stub = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", process.Number("listening=true port=")), {}));
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

TEST_F(RouterProcessTest, WhatIsWrongAtTheStartIsOneSentence) {
  const auto listening = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(listening.ok());
  const std::string taken = absl::StrCat("127.0.0.1:", (*listening)->port());
  Process in_use(Flags("127.0.0.1:1", taken));
  EXPECT_EQ(in_use.Wait(), 1);
  EXPECT_THAT(in_use.said(), HasSubstr("ferry-router: cannot listen on " + taken));

  Process no_assets({"--model_assets=/nowhere/at/all", "--workers=127.0.0.1:1"});
  EXPECT_EQ(no_assets.Wait(), 1);
  EXPECT_THAT(no_assets.said(),
              HasSubstr("ferry-router: model assets /nowhere/at/all is not a directory"));

  Process no_workers({"--model_assets=" + assets_.path()});
  EXPECT_EQ(no_workers.Wait(), 1);
  EXPECT_THAT(no_workers.said(), HasSubstr("ferry-router: --workers is missing"));

  assets_.Write("config.json", "{}");
  Process bad_config(Flags("127.0.0.1:1"));
  EXPECT_EQ(bad_config.Wait(), 1);
  EXPECT_THAT(bad_config.said(), HasSubstr("config.json: vocab_size is missing"));
}

}  // namespace
}  // namespace router

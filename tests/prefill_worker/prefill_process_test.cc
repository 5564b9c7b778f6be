// ferry-prefill as a process: what it says of itself, how it stops, and how it fails to start.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "service/grpc_server.h"

namespace prefill_worker {
namespace {

using ::testing::HasSubstr;

std::string Env(const char* name) { return std::getenv(name); }

// One run of the program; its stderr comes through a pipe.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    static int runs = 0;
    port_file_ =
        testing::TempDir() + "prefill." + std::to_string(getpid()) + "." + std::to_string(++runs);
    arguments.insert(arguments.begin(), Env("FERRY_BIN_DIR") + "/ferry-prefill");
    arguments.push_back("--port_file=" + port_file_);
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
    std::filesystem::remove(port_file_);
  }

  // Its exit code, when it has ended.
  int Wait() {
    ReadLogUntil("");
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  void Terminate() { kill(pid_, SIGTERM); }
  // 0 if it ends before it serves.
  int GrpcPort() {
    int port = 0;
    if (ReadLogUntil(" serving ")) {
      std::ifstream file(port_file_);
      std::string line;
      std::getline(file, line);
      std::sscanf(line.c_str(), "grpc_port=%d", &port);
    }
    return port;
  }
  const std::string& log() const { return log_; }

 private:
  // False at the end of its stderr.
  bool ReadLogUntil(const std::string& words) {
    while (words.empty() || log_.find(words) == std::string::npos) {
      char buffer[4096];
      const ssize_t n = read(stderr_, buffer, sizeof(buffer));
      if (n <= 0) return false;
      log_.append(buffer, n);
    }
    return true;
  }

  std::string port_file_;
  std::string log_;
  int stderr_ = -1;
  pid_t pid_ = -1;
};

std::vector<std::string> Arguments() {
  return {"--model=" + Env("FERRY_GOLDEN_DIR") + "/models/v3_odd", "--listen=127.0.0.1:0",
          "--metrics_listen=127.0.0.1:0", "--num_blocks=32", "--num_threads=1"};
}

TEST(PrefillProcessTest, ServesWithARealTransportAndEndsOnSigterm) {
  Process process(Arguments());
  const int port = process.GrpcPort();
  ASSERT_GT(port, 0) << process.log();
  auto stub =
      ferry::v1::Worker::NewStub(service::MakeChannel("127.0.0.1:" + std::to_string(port), {}));
  grpc::ClientContext context;
  ferry::v1::WorkerInfo info;
  ASSERT_TRUE(stub->GetInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.role(), ferry::v1::WORKER_ROLE_PREFILL);
  EXPECT_EQ(info.model(), "v3_odd");
  EXPECT_EQ(info.num_blocks(), 32u);
  EXPECT_THAT(info.transports(), testing::ElementsAre("shm", "tcp"));
  EXPECT_GT(info.prefill_tokens_per_s(), 0);
  EXPECT_GT(info.decode_step_ms(), 0);
  // The self-benchmark has left nothing behind.
  grpc::ClientContext load_context;
  auto reader = stub->WatchLoad(&load_context, {});
  ferry::v1::LoadReport report;
  ASSERT_TRUE(reader->Read(&report));
  EXPECT_EQ(report.kv_blocks().free(), 32u);
  process.Terminate();
  // The stream ends with the process; before that it says that the worker drains.
  bool draining = false;
  while (reader->Read(&report)) draining |= report.state() == ferry::v1::WORKER_STATE_DRAINING;
  EXPECT_TRUE(draining);
  EXPECT_EQ(process.Wait(), 0) << process.log();
  EXPECT_THAT(process.log(), HasSubstr("process=ferry-prefill serving model=v3_odd"));
}

TEST(PrefillProcessTest, AWrongCheckpointIsOneSentence) {
  Process process({"--model=/nowhere", "--listen=127.0.0.1:0"});
  EXPECT_EQ(process.GrpcPort(), 0);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.log(), testing::StartsWith("ferry-prefill: "));
  EXPECT_THAT(process.log(), HasSubstr("/nowhere"));
  EXPECT_EQ(std::count(process.log().begin(), process.log().end(), '\n'), 1) << process.log();
}

TEST(PrefillProcessTest, APortInUseIsOneSentence) {
  auto taken = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(taken.ok());
  const std::string address = "127.0.0.1:" + std::to_string((*taken)->port());
  std::vector<std::string> arguments = Arguments();
  arguments[1] = "--listen=" + address;
  Process process(arguments);
  EXPECT_EQ(process.GrpcPort(), 0);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_EQ(process.log(),
            "ferry-prefill: cannot listen on " + address + ": address already in use\n");
}

TEST(PrefillProcessTest, BadFlagsAreAllNamed) {
  Process process({"--listen=x", "--chunk_tokens=0"});
  EXPECT_EQ(process.GrpcPort(), 0);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.log(), HasSubstr("--listen: address \"x\""));
  EXPECT_THAT(process.log(), HasSubstr("--model is missing"));
  EXPECT_THAT(process.log(), HasSubstr("--chunk_tokens: 0"));
}

}  // namespace
}  // namespace prefill_worker

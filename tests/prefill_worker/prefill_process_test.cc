// ferry-prefill as a process: what it says of itself, how it stops, and how it fails to start.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "service/grpc_server.h"
#include "tests/fakes/program.h"

namespace prefill_worker {
namespace {

using ::testing::HasSubstr;

std::string Env(const char* name) { return std::getenv(name); }

constexpr char kServing[] = " serving role=prefill address=127.0.0.1:";

fakes::Program Prefill(std::vector<std::string> arguments) {
  return fakes::Program("ferry-prefill", std::move(arguments));
}

std::vector<std::string> Arguments() {
  return {"--model=" + Env("FERRY_GOLDEN_DIR") + "/models/v3_odd", "--listen=127.0.0.1:0",
          "--metrics_listen=127.0.0.1:0", "--num_blocks=32", "--num_threads=1"};
}

TEST(PrefillProcessTest, ServesWithARealTransportAndEndsOnSigterm) {
  fakes::Program process = Prefill(Arguments());
  ASSERT_TRUE(process.ReadUntil(" metrics_port=")) << process.said();
  const int port = process.Number(kServing);
  ASSERT_GT(port, 0) << process.said();
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
  process.Signal(SIGTERM);
  // The stream ends with the process; before that it says that the worker drains.
  bool draining = false;
  while (reader->Read(&report)) draining |= report.state() == ferry::v1::WORKER_STATE_DRAINING;
  EXPECT_TRUE(draining);
  EXPECT_EQ(process.Wait(), 0) << process.said();
  EXPECT_THAT(process.said(), HasSubstr(" model=v3_odd epoch="));
}

TEST(PrefillProcessTest, AWrongCheckpointIsOneSentence) {
  fakes::Program process = Prefill({"--model=/nowhere", "--listen=127.0.0.1:0"});
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.said(), testing::StartsWith("ferry-prefill: "));
  EXPECT_THAT(process.said(), HasSubstr("/nowhere"));
  EXPECT_EQ(std::count(process.said().begin(), process.said().end(), '\n'), 1) << process.said();
}

TEST(PrefillProcessTest, APortInUseIsOneSentence) {
  auto taken = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(taken.ok());
  const std::string address = "127.0.0.1:" + std::to_string((*taken)->port());
  std::vector<std::string> arguments = Arguments();
  arguments[1] = "--listen=" + address;
  fakes::Program process = Prefill(arguments);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_EQ(process.said(),
            "ferry-prefill: cannot listen on " + address + ": address already in use\n");
}

TEST(PrefillProcessTest, BadFlagsAreAllNamed) {
  fakes::Program process = Prefill({"--listen=x", "--chunk_tokens=0"});
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.said(), HasSubstr("--listen: address \"x\""));
  EXPECT_THAT(process.said(), HasSubstr("--model is missing"));
  EXPECT_THAT(process.said(), HasSubstr("--chunk_tokens: 0"));
}

}  // namespace
}  // namespace prefill_worker

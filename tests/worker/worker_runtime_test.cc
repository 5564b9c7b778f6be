#include "worker/worker_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "service/grpc_server.h"

namespace worker {
namespace {

// Loading a large checkpoint takes minutes: what can be known before is said before.
TEST(StartRuntimeTest, AFileThatAFlagNamesIsOpenedBeforeTheCheckpointIsLoaded) {
  WorkerOptions options;
  options.listen = options.metrics_listen = "127.0.0.1:0";
  options.engine.model_dir = "/nowhere";
  options.tls.cert_file = "/nowhere/cert.pem";
  options.tls.key_file = "/nowhere/key.pem";
  EXPECT_EQ(StartRuntime(options).status().message(), "tls key: no such file: /nowhere/key.pem");
  options.tls = {};
  options.port_file = "/nowhere/ports";
  EXPECT_EQ(StartRuntime(options).status().message(),
            "cannot write port file /nowhere/ports: no such file or directory");
}

TEST(StartRuntimeTest, ADataLinkThatCannotBeOpenedIsSaidBeforeTheCheckpointIsLoaded) {
  const auto other = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(other.ok()) << other.status();
  WorkerOptions options;
  options.listen = options.metrics_listen = "127.0.0.1:0";
  options.engine.model_dir = "/nowhere";
  options.data_ip = "127.0.0.1";
  options.data_port = (*other)->port();
  EXPECT_THAT(
      std::string(StartRuntime(options).status().message()),
      testing::HasSubstr(absl::StrCat("ucx tcp: listening on 127.0.0.1 port ", options.data_port)));
  options.data_ip = "somewhere";
  EXPECT_THAT(std::string(StartRuntime(options).status().message()),
              testing::HasSubstr("\"somewhere\" port"));
}

TEST(StartRuntimeTest, APortInUseIsSaidBeforeTheCheckpointIsLoaded) {
  const auto other = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(other.ok()) << other.status();
  const std::string taken = absl::StrCat("127.0.0.1:", (*other)->port());
  for (std::string WorkerOptions::*flag :
       {&WorkerOptions::listen, &WorkerOptions::metrics_listen}) {
    WorkerOptions options;
    options.listen = options.metrics_listen = "127.0.0.1:0";
    options.engine.model_dir = "/nowhere";
    EXPECT_EQ(StartRuntime(options).status().message(), "no such file: /nowhere/config.json");
    options.*flag = taken;
    const absl::Status status = StartRuntime(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(status.message(),
              absl::StrCat("cannot listen on ", taken, ": address already in use"));
  }
}

}  // namespace
}  // namespace worker

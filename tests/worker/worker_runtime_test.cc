#include "worker/worker_runtime.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "service/grpc_server.h"

namespace worker {
namespace {

// Loading a large checkpoint takes minutes: what can be known before is said before.
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

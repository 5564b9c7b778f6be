#include "tests/integration/other_router.h"

#include <signal.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "status/check.h"

namespace integration {
namespace {

// Sanitized builds start slowly.
constexpr absl::Duration kStartTimeout = absl::Seconds(120);

}  // namespace

OtherRouter::OtherRouter(FerrySystem& system, const SystemOptions& options) : dir_(MakeTestDir()) {
  std::vector<std::string> workers;
  for (int i = 0; i < options.num_prefill; ++i) workers.push_back(system.prefill(i).address);
  for (int i = 0; i < options.num_decode; ++i) workers.push_back(system.decode(i).address);
  argv_ = {absl::StrCat(std::getenv("FERRY_BIN_DIR"), "/ferry-router"),
           "--model_assets=" + options.model_dir, "--metrics_listen=127.0.0.1:0",
           "--workers=" + absl::StrJoin(workers, ","),
           absl::StrCat("--port_file=", dir_, "/ports")};
  argv_.insert(argv_.end(), options.router_flags.begin(), options.router_flags.end());
  Start();
}

void OtherRouter::Start() {
  std::filesystem::remove(dir_ + "/ports");
  std::vector<std::string> argv = argv_;
  argv.push_back("--listen=" + address_);
  process_ = std::make_unique<ChildProcess>(ChildProcess::Start(argv, dir_ + "/log"));
  const auto port = WaitForPort(dir_ + "/ports", "grpc_port", kStartTimeout);
  FERRY_CHECK(port.ok()) << port.status() << "\n" << process_->log();
  address_ = absl::StrCat("127.0.0.1:", *port);
  client_ = *ferry::Client::Create({.address = address_, .timeout = kStartTimeout});
  const absl::Status ready = client_->WaitUntilReady("", kStartTimeout);
  FERRY_CHECK(ready.ok()) << ready << "\n" << process_->log();
}

void OtherRouter::Roll() {
  process_->Signal(SIGTERM);
  EXPECT_EQ(process_->Wait(absl::Seconds(60)), 0) << process_->log();
  Start();
}

}  // namespace integration

#include "tests/integration/ferry_system.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "status/check.h"

namespace integration {
namespace {

// Sanitized builds start slowly.
constexpr absl::Duration kStartTimeout = absl::Seconds(120);

std::string Binary(const std::string& name) {
  const char* dir = std::getenv("FERRY_BIN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_BIN_DIR is not set";
  return absl::StrCat(dir, "/", name);
}

bool IsIdle(const ferry::v1::LoadReport& load) {
  const ferry::v1::KvBlockCounts& blocks = load.kv_blocks();
  return load.waiting_requests() == 0 && load.running_requests() == 0 && blocks.active() == 0 &&
         blocks.reserved() == 0 && blocks.held() == 0 && blocks.quarantined() == 0;
}

}  // namespace

WorkerProcess FerrySystem::StartWorker(const std::string& binary, const std::string& name,
                                       const std::vector<std::string>& flags,
                                       const std::string& listen) {
  const std::string port_file = absl::StrCat(dir_, "/", name, ".ports");
  std::vector<std::string> argv = {
      Binary(binary), "--model",   options_.model_dir, "--listen",    listen,   "--metrics_listen",
      "127.0.0.1:0",  "--data_ip", "127.0.0.1",        "--port_file", port_file};
  argv.insert(argv.end(), flags.begin(), flags.end());
  WorkerProcess worker = {
      .binary = binary,
      .name = name,
      .flags = flags,
      .process = ChildProcess::Start(argv, absl::StrCat(dir_, "/", name, ".log")),
      .address = "",
      .metrics_port = 0,
      .stub = nullptr};
  const auto port = WaitForPort(port_file, "grpc_port", kStartTimeout);
  FERRY_CHECK(port.ok()) << port.status() << "\n" << worker.process.log();
  worker.metrics_port = WaitForPort(port_file, "metrics_port", kStartTimeout).value();
  worker.address = absl::StrCat("127.0.0.1:", *port);
  worker.stub = ferry::v1::Worker::NewStub(
      grpc::CreateChannel(worker.address, grpc::InsecureChannelCredentials()));
  return worker;
}

std::unique_ptr<FerrySystem> FerrySystem::Start(const SystemOptions& options) {
  std::unique_ptr<FerrySystem> system(new FerrySystem());
  system->options_ = options;
  system->dir_ = MakeTestDir();
  std::vector<std::string> addresses;
  for (int i = 0; i < options.num_decode; ++i) {
    system->decode_.push_back(
        system->StartWorker("ferry-decode", absl::StrCat("decode", i), options.decode_flags));
    addresses.push_back(system->decode_.back().address);
  }
  for (int i = 0; i < options.num_prefill; ++i) {
    system->prefill_.push_back(
        system->StartWorker("ferry-prefill", absl::StrCat("prefill", i), options.prefill_flags));
    addresses.push_back(system->prefill_.back().address);
  }
  const std::string port_file = system->dir_ + "/router.ports";
  std::vector<std::string> argv = {Binary("ferry-router"),
                                   "--model_assets",
                                   options.model_dir,
                                   "--listen",
                                   "127.0.0.1:0",
                                   "--metrics_listen",
                                   "127.0.0.1:0",
                                   "--workers",
                                   absl::StrJoin(addresses, ","),
                                   "--port_file",
                                   port_file};
  argv.insert(argv.end(), options.router_flags.begin(), options.router_flags.end());
  system->router_ =
      std::make_unique<ChildProcess>(ChildProcess::Start(argv, system->dir_ + "/router.log"));
  const auto port = WaitForPort(port_file, "grpc_port", kStartTimeout);
  FERRY_CHECK(port.ok()) << port.status() << "\n" << system->router_->log();
  system->router_metrics_port_ = WaitForPort(port_file, "metrics_port", kStartTimeout).value();
  system->router_address_ = absl::StrCat("127.0.0.1:", *port);
  system->client_ = system->NewClient(absl::Seconds(120));
  const absl::Status ready = system->client_->WaitUntilReady("", kStartTimeout);
  FERRY_CHECK(ready.ok()) << ready << "\n" << system->router_->log();
  return system;
}

std::unique_ptr<ferry::Client> FerrySystem::NewClient(absl::Duration timeout) const {
  ferry::ClientOptions options;
  options.address = router_address_;
  options.timeout = timeout;
  return ferry::Client::Create(options).value();
}

void FerrySystem::Restart(WorkerProcess& worker) {
  worker.process.Kill();
  std::filesystem::remove(absl::StrCat(dir_, "/", worker.name, ".ports"));
  worker = StartWorker(worker.binary, worker.name, worker.flags, worker.address);
}

std::string FerrySystem::WaitUntilReady(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::string said;
  while (true) {
    const auto models = client_->ListModels();
    if (models.ok() && models->size() == 1 &&
        models->front().ready_decode_workers() == decode_.size() &&
        models->front().ready_prefill_workers() == prefill_.size()) {
      return "";
    }
    said = models.ok() && !models->empty() ? models->front().ShortDebugString()
                                           : models.status().ToString();
    if (absl::Now() >= deadline) return said;
    // The router learns of a worker by itself; its own clock is the worker's report.
    WaitForLoad(
        decode_.front(), [seen = 0](const auto&) mutable { return ++seen > 3; }, absl::Seconds(1));
  }
}

void FerrySystem::ExpectDead(ChildProcess& process) { expected_dead_.push_back(process.pid()); }

FerrySystem::~FerrySystem() {
  const auto expected_dead = [&](const ChildProcess& process) {
    return std::count(expected_dead_.begin(), expected_dead_.end(), process.pid()) > 0;
  };
  const auto reap = [&](ChildProcess& process, const std::string& name) {
    // Of a killed process the log alone tells what a sanitizer has found.
    for (const char* report : {"Sanitizer: ", ": runtime error: "}) {
      EXPECT_EQ(process.log().find(report), std::string::npos) << name << "\n" << process.log();
    }
    if (expected_dead(process)) return;
    const std::optional<int> code = process.Wait(absl::Seconds(60));
    EXPECT_TRUE(code.has_value()) << name << " did not stop\n" << process.log();
    if (code.has_value()) {
      EXPECT_EQ(*code, 0) << name << "\n" << process.log();
    }
  };
  if (router_ != nullptr) {
    router_->Signal(SIGTERM);
    reap(*router_, "router");
  }
  for (std::vector<WorkerProcess>* workers : {&prefill_, &decode_}) {
    for (WorkerProcess& worker : *workers) {
      if (!expected_dead(worker.process)) worker.process.Signal(SIGTERM);
    }
  }
  for (WorkerProcess& worker : prefill_) reap(worker.process, "prefill");
  for (WorkerProcess& worker : decode_) reap(worker.process, "decode");
  if (testing::Test::HasFailure() && router_ != nullptr) {
    std::fprintf(stderr, "--- router\n%s\n", router_->log().c_str());
    for (WorkerProcess& worker : prefill_) {
      std::fprintf(stderr, "--- prefill\n%s\n", worker.process.log().c_str());
    }
    for (WorkerProcess& worker : decode_) {
      std::fprintf(stderr, "--- decode\n%s\n", worker.process.log().c_str());
    }
  }
}

bool FerrySystem::WaitForLoad(WorkerProcess& worker,
                              const std::function<bool(const ferry::v1::LoadReport&)>& done,
                              absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  ferry::v1::WatchLoadRequest request;
  request.set_interval_ms(10);
  const auto stream = worker.stub->WatchLoad(&context, request);
  ferry::v1::LoadReport report;
  bool accepted = false;
  while (!accepted && stream->Read(&report)) accepted = done(report);
  context.TryCancel();
  while (stream->Read(&report)) {
  }
  stream->Finish();
  return accepted;
}

std::string FerrySystem::WaitUntilIdle(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::string problems;
  const auto check = [&](std::vector<WorkerProcess>& workers, const std::string& kind) {
    for (WorkerProcess& worker : workers) {
      if (std::count(expected_dead_.begin(), expected_dead_.end(), worker.process.pid()) > 0)
        continue;
      ferry::v1::LoadReport last;
      const bool idle = WaitForLoad(
          worker,
          [&](const ferry::v1::LoadReport& load) {
            last = load;
            return IsIdle(load);
          },
          deadline - absl::Now());
      if (!idle)
        absl::StrAppend(&problems, kind, " ", worker.address, ": ", last.ShortDebugString(), "\n");
    }
  };
  check(prefill_, "prefill");
  check(decode_, "decode");
  return problems;
}

std::string ReadMetrics(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  std::string body;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
    (void)!send(fd, request.data(), request.size(), 0);
    char buffer[65536];
    for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) body.append(buffer, n);
  }
  close(fd);
  const size_t start = body.find("\r\n\r\n");
  return start == std::string::npos ? "" : body.substr(start + 4);
}

}  // namespace integration

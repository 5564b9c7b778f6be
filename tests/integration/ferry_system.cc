#include "tests/integration/ferry_system.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "status/check.h"

namespace integration {
namespace {

// Sanitized builds start slowly.
constexpr absl::Duration kStartTimeout = absl::Seconds(120);
constexpr absl::Duration kEndTimeout = absl::Seconds(60);
constexpr absl::Duration kReportInterval = absl::Milliseconds(10);

std::string Binary(const std::string& name) {
  const char* dir = std::getenv("FERRY_BIN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_BIN_DIR is not set";
  return absl::StrCat(dir, "/", name);
}

// Blocks, or state slots of a model that keeps a state.
bool NoneInUse(const ferry::v1::KvBlockCounts& counts) {
  return counts.active() == 0 && counts.reserved() == 0 && counts.held() == 0 &&
         counts.quarantined() == 0;
}

bool IsIdle(const ferry::v1::LoadReport& load) {
  return load.waiting_requests() == 0 && load.running_requests() == 0 &&
         NoneInUse(load.kv_blocks()) && NoneInUse(load.state_slots());
}

}  // namespace

WorkerProcess FerrySystem::StartWorker(const std::string& binary, const std::string& name,
                                       const std::vector<std::string>& flags, int listen_port) {
  const std::string port_file = absl::StrCat(dir_, "/", name, ".ports");
  const Site site = SiteOf(name);
  std::vector<std::string> argv = {Binary(binary),
                                   "--model",
                                   options_.model_dir,
                                   "--listen",
                                   absl::StrCat(site.ip, ":", listen_port),
                                   "--metrics_listen",
                                   site.ip + ":0",
                                   "--data_ip",
                                   site.ip,
                                   "--port_file",
                                   port_file};
  argv.insert(argv.end(), flags.begin(), flags.end());
  WorkerProcess worker = {.binary = binary,
                          .name = name,
                          .flags = flags,
                          .process = site.start(argv, absl::StrCat(dir_, "/", name, ".log")),
                          .ip = site.ip,
                          .address = "",
                          .front = "",
                          .metrics_port = 0,
                          .stub = nullptr};
  const auto port = WaitForPort(port_file, "grpc_port", kStartTimeout);
  FERRY_CHECK(port.ok()) << port.status() << "\n" << worker.process.log();
  worker.metrics_port = WaitForPort(port_file, "metrics_port", kStartTimeout).value();
  worker.address = absl::StrCat(site.ip, ":", *port);
  worker.front = site.front == nullptr ? worker.address : site.front(worker.address);
  worker.stub = ferry::v1::Worker::NewStub(
      grpc::CreateChannel(worker.address, grpc::InsecureChannelCredentials()));
  return worker;
}

std::unique_ptr<FerrySystem> FerrySystem::Start(const SystemOptions& options) {
  std::unique_ptr<FerrySystem> system(new FerrySystem());
  system->options_ = options;
  system->dir_ = MakeTestDir();
  for (int i = 0; i < options.num_decode; ++i) {
    system->decode_.push_back(
        system->StartWorker("ferry-decode", absl::StrCat("decode", i), options.decode_flags));
  }
  for (int i = 0; i < options.num_prefill; ++i) {
    system->prefill_.push_back(
        system->StartWorker("ferry-prefill", absl::StrCat("prefill", i), options.prefill_flags));
  }
  system->StartRouter(/*port=*/0);
  return system;
}

Site FerrySystem::SiteOf(const std::string& name) const {
  return options_.site == nullptr ? Site() : options_.site(name);
}

void FerrySystem::StartRouter(int listen_port) {
  std::vector<std::string> addresses;
  for (const WorkerProcess& worker : decode_) addresses.push_back(worker.front);
  for (const WorkerProcess& worker : prefill_) addresses.push_back(worker.front);
  const Site site = SiteOf("router");
  const std::string port_file = dir_ + "/router.ports";
  std::filesystem::remove(port_file);
  std::vector<std::string> argv = {Binary("ferry-router"),
                                   "--model_assets",
                                   options_.model_dir,
                                   "--listen",
                                   absl::StrCat(site.ip, ":", listen_port),
                                   "--metrics_listen",
                                   site.ip + ":0",
                                   "--workers",
                                   absl::StrJoin(addresses, ","),
                                   "--port_file",
                                   port_file};
  argv.insert(argv.end(), options_.router_flags.begin(), options_.router_flags.end());
  router_ = std::make_unique<ChildProcess>(site.start(argv, dir_ + "/router.log"));
  const auto port = WaitForPort(port_file, "grpc_port", kStartTimeout);
  FERRY_CHECK(port.ok()) << port.status() << "\n" << router_->log();
  router_metrics_port_ = WaitForPort(port_file, "metrics_port", kStartTimeout).value();
  router_ip_ = site.ip;
  router_port_ = *port;
  router_address_ = absl::StrCat(site.ip, ":", *port);
  client_ = NewClient(absl::Seconds(120));
  const std::string not_ready = WaitUntilReady(kStartTimeout);
  FERRY_CHECK(not_ready.empty()) << not_ready << "\n" << router_->log();
}

int FerrySystem::router_http_port() const {
  return WaitForPort(dir_ + "/router.ports", "http_port", kStartTimeout).value();
}

void FerrySystem::KillRouter() { router_.reset(); }

void FerrySystem::RestartRouter() {
  KillRouter();
  StartRouter(router_port_);
}

std::unique_ptr<ferry::Client> FerrySystem::NewClient(absl::Duration timeout) const {
  ferry::ClientOptions options;
  options.address = router_address_;
  options.timeout = timeout;
  options.max_attempts = 1;  // tests see what the router says
  return ferry::Client::Create(options).value();
}

void FerrySystem::Restart(WorkerProcess& worker) {
  worker.process.Kill();
  StartAgain(worker);
}

void FerrySystem::Roll(WorkerProcess& worker) {
  worker.process.Signal(SIGTERM);
  EXPECT_EQ(worker.process.Wait(kEndTimeout), 0) << worker.name << "\n" << worker.process.log();
  StartAgain(worker);
}

void FerrySystem::RollRouter() {
  router_->Signal(SIGTERM);
  EXPECT_EQ(router_->Wait(kEndTimeout), 0) << "router\n" << router_->log();
  StartRouter(router_port_);
}

void FerrySystem::StartAgain(WorkerProcess& worker) {
  std::filesystem::remove(absl::StrCat(dir_, "/", worker.name, ".ports"));
  int port = 0;
  FERRY_CHECK(absl::SimpleAtoi(worker.address.substr(worker.address.rfind(':') + 1), &port));
  worker = StartWorker(worker.binary, worker.name, worker.flags, port);
}

std::string FerrySystem::WaitUntilReady(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::string said;
  while (true) {
    const auto models = client_->ListModels();
    if (models.ok() && models->size() == 1 &&
        models->front().ready_decode_workers() >= decode_.size() &&
        models->front().ready_prefill_workers() >= prefill_.size()) {
      return "";
    }
    said = models.ok() && !models->empty() ? models->front().ShortDebugString()
                                           : models.status().ToString();
    if (absl::Now() >= deadline) return said;
    LetReportsPass(3);
  }
}

std::vector<WorkerProcess*> FerrySystem::Living() {
  std::vector<WorkerProcess*> living;
  for (std::vector<WorkerProcess>* workers : {&prefill_, &decode_}) {
    for (WorkerProcess& worker : *workers) {
      if (!IsExpectedDead(worker.process)) living.push_back(&worker);
    }
  }
  return living;
}

bool FerrySystem::IsExpectedDead(const ChildProcess& process) const {
  return std::count(expected_dead_.begin(), expected_dead_.end(), process.pid()) > 0;
}

void FerrySystem::LetReportsPass(int count) {
  WaitForLoad(
      *Living().front(), [seen = 0, count](const auto&) mutable { return ++seen > count; },
      count * 10 * kReportInterval);
}

void FerrySystem::ExpectDead(ChildProcess& process) { expected_dead_.push_back(process.pid()); }

FerrySystem::~FerrySystem() {
  const auto reap = [&](ChildProcess& process, const std::string& name) {
    // Of a killed process the log alone tells what a sanitizer has found.
    for (const char* report : {"Sanitizer: ", ": runtime error: "}) {
      EXPECT_EQ(process.log().find(report), std::string::npos) << name << "\n" << process.log();
    }
    if (IsExpectedDead(process)) return;
    const std::optional<int> code = process.Wait(kEndTimeout);
    EXPECT_TRUE(code.has_value()) << name << " did not stop\n" << process.log();
    if (code.has_value()) {
      EXPECT_EQ(*code, 0) << name << "\n" << process.log();
    }
  };
  if (router_ != nullptr) {
    router_->Signal(SIGTERM);
    reap(*router_, "router");
  }
  for (WorkerProcess* worker : Living()) worker->process.Signal(SIGTERM);
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
  request.set_interval_ms(absl::ToInt64Milliseconds(kReportInterval));
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
  for (WorkerProcess* worker : Living()) {
    ferry::v1::LoadReport last;
    const bool idle = WaitForLoad(
        *worker,
        [&](const ferry::v1::LoadReport& load) {
          last = load;
          return IsIdle(load);
        },
        deadline - absl::Now());
    if (!idle) absl::StrAppend(&problems, worker->name, ": ", last.ShortDebugString(), "\n");
  }
  if (!problems.empty()) return problems;
  // Gauges are written a little later, the router's every second.
  while (true) {
    problems = OccupiedGauges();
    if (problems.empty() || absl::Now() >= deadline) return problems;
    LetReportsPass(3);
  }
}

std::string FerrySystem::OccupiedGauges() {
  std::string occupied;
  const auto check = [&](const std::string& process, int port, const std::string& ip,
                         std::vector<std::string> gauges) {
    const std::string metrics = ReadMetrics(port, ip);
    if (SumOf(metrics, "ferry_state_slots").has_value()) {
      for (const char* state : {"active", "reserved", "held", "quarantined"}) {
        gauges.push_back(absl::StrCat("ferry_state_slots{state=\"", state, "\"}"));
      }
    }
    for (const std::string& gauge : gauges) {
      const std::optional<double> value = SumOf(metrics, gauge);
      if (value != 0.0) {
        absl::StrAppend(&occupied, process, ": ", gauge, " ",
                        value.has_value() ? absl::StrCat(*value) : "is missing", "\n");
      }
    }
  };
  for (WorkerProcess* worker : Living()) {
    check(worker->name, worker->metrics_port, worker->ip,
          {"ferry_requests_running", "ferry_requests_waiting", "ferry_leases",
           "ferry_transfer_inflight", "ferry_kv_blocks{state=\"active\"}",
           "ferry_kv_blocks{state=\"reserved\"}", "ferry_kv_blocks{state=\"held\"}",
           "ferry_kv_blocks{state=\"quarantined\"}"});
  }
  if (router_ != nullptr) {
    check("router", router_metrics_port_, router_ip_,
          {"ferry_router_queue_requests", "ferry_router_queue_bytes",
           "ferry_router_running_requests"});
  }
  return occupied;
}

std::string ReadMetrics(int port, const std::string& ip) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval patience = {.tv_sec = 5, .tv_usec = 0};  // also of connect
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, ip.c_str(), &address.sin_addr);
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

std::optional<double> SumOf(const std::string& metrics, const std::string& name) {
  std::optional<double> sum;
  for (absl::string_view line : absl::StrSplit(metrics, '\n')) {
    if (!absl::ConsumePrefix(&line, name)) continue;
    const size_t space = line.rfind(' ');
    // After the name come the labels, unless they were part of it.
    if (space == absl::string_view::npos || (space > 0 && line.front() != '{')) continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(space + 1), &value)) sum = sum.value_or(0) + value;
  }
  return sum;
}

}  // namespace integration

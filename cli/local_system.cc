#include "cli/local_system.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "input_file/input_file.h"
#include "service/listen_address.h"
#include "service/process.h"
#include "service/startup.h"
#include "status/status_macros.h"

namespace cli {
namespace {

// How often a starting process' port file, and a running process, is looked at.
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);
constexpr absl::Duration kSuperviseInterval = absl::Milliseconds(200);
// For one answer of a process on this machine; then children and signals are looked at.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(1);

// Whether processes on 127.0.0.1 can call each other with these files, as they will.
absl::Status CheckTls(const service::TlsOptions& tls) {
  if (!tls.enabled() && tls.key_file.empty()) return absl::OkStatus();
  if (tls.cert_file.empty() || tls.key_file.empty() || tls.ca_file.empty()) {
    return absl::InvalidArgumentError(
        "--tls_cert, --tls_key and --tls_ca are needed together: router and workers call each "
        "other "
        "with them");
  }
  ASSIGN_OR_RETURN(const auto server, service::GrpcServer::Start("127.0.0.1:0", tls, {}));
  const absl::Status called =
      service::CallHealth(absl::StrCat("127.0.0.1:", server->port()), tls, kAnswerTimeout);
  if (called.ok()) return called;
  return absl::InvalidArgumentError(absl::StrCat(
      "a server with --tls_cert ", tls.cert_file, " cannot be called at 127.0.0.1 with --tls_ca ",
      tls.ca_file, ": is it made for 127.0.0.1 and signed by that authority? (",
      std::string(called.message()), ")"));
}

// "" without HTTP.
std::string HttpListen(const LocalSystemOptions& options) {
  return options.http_port.has_value() ? absl::StrCat("127.0.0.1:", *options.http_port) : "";
}

std::string ModelName(const std::string& model_dir) {
  std::filesystem::path path = std::filesystem::absolute(model_dir).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

}  // namespace

std::string OwnDirectory() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

LocalSystem::LocalSystem(LocalSystemOptions options)
    : options_(std::move(options)), model_name_(ModelName(options_.model_dir)) {}

absl::StatusOr<std::unique_ptr<LocalSystem>> LocalSystem::Start(const LocalSystemOptions& options) {
  std::unique_ptr<LocalSystem> system(new LocalSystem(options));
  RETURN_IF_ERROR(system->StartAll());
  return system;
}

LocalSystem::~LocalSystem() {
  routers_.clear();
  prefills_.clear();
  decodes_.clear();
  if (log_fd_ != 2) close(log_fd_);
  std::error_code ignored;
  if (!run_dir_.empty()) std::filesystem::remove_all(run_dir_, ignored);
}

ferry::ClientOptions LocalSystem::client_options() const {
  return {.address = router_address_,
          .tls_ca_file = options_.tls.ca_file,
          .tls_cert_file = options_.tls.cert_file,
          .tls_key_file = options_.tls.key_file};
}

absl::Status LocalSystem::CheckOptions() const {
  const bool all_short = std::any_of(
      options_.router_flags.begin(), options_.router_flags.end(),
      [](const std::string& flag) { return absl::StartsWith(flag, "--local_prefill_tokens"); });
  if (options_.num_decode < 1 || (options_.num_prefill < 1 && !options_.role_both && !all_short)) {
    return absl::InvalidArgumentError(
        "need at least one decode worker, and a prefill worker, --role_both, or "
        "--router_flag=--local_prefill_tokens=N of the model's length");
  }
  const absl::Status config = input_file::Check(options_.model_dir + "/config.json");
  if (!config.ok()) {
    return absl::Status(
        config.code(),
        absl::StrCat(options_.model_dir, " is not a checkpoint: ", std::string(config.message())));
  }
  if (absl::StrContains(model_name_, '=') || absl::StrContains(options_.model_dir, ',')) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model ", options_.model_dir,
                     ": a served directory has no '=' in its name and no ',' in its path; link it "
                     "under another name"));
  }
  RETURN_IF_ERROR(service::CheckStart({.listen = absl::StrCat("127.0.0.1:", options_.port),
                                       .metrics_listen = "127.0.0.1:0",
                                       .port_file = options_.port_file,
                                       .tls = options_.tls}));
  if (options_.http_port.has_value()) {
    RETURN_IF_ERROR(service::CheckCanListen(HttpListen(options_)));
    if (*options_.http_port > 0 && *options_.http_port == options_.port) {
      return absl::InvalidArgumentError(
          absl::StrCat("gRPC and HTTP cannot both have port ", options_.port));
    }
  }
  return CheckTls(options_.tls);
}

absl::Status LocalSystem::StartAll() {
  RETURN_IF_ERROR(CheckOptions());
  if (!options_.log_path.empty()) {
    // Of a pipe that nobody reads the open fails instead of waiting.
    log_fd_ = open(options_.log_path.c_str(),
                   O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0644);
    if (log_fd_ < 0) {
      log_fd_ = 2;
      return absl::InvalidArgumentError(
          absl::StrCat("cannot write ", options_.log_path, ": ", std::strerror(errno)));
    }
    fcntl(log_fd_, F_SETFL, O_APPEND);
  }
  std::string pattern = (std::filesystem::temp_directory_path() / "ferry_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::InternalError(absl::StrCat("mkdtemp ", pattern, ": ", std::strerror(errno)));
  }
  run_dir_ = pattern;
  ready_deadline_ = absl::Now() + options_.ready_timeout;
  RETURN_IF_ERROR(StartWorkers("prefill", options_.num_prefill, options_.prefill_flags, prefills_));
  std::vector<std::string> decode_flags = options_.decode_flags;
  if (options_.role_both) decode_flags.insert(decode_flags.begin(), "--role=both");
  RETURN_IF_ERROR(StartWorkers("decode", options_.num_decode, decode_flags, decodes_));
  return StartRouter();
}

absl::StatusOr<std::unique_ptr<ChildProcess>> LocalSystem::StartChild(
    const std::string& name, const std::string& binary, std::vector<std::string> flags) {
  ChildProcess::Options child{.name = name, .arguments = {}, .log_fd = log_fd_};
  child.arguments = {absl::StrCat(options_.bin_dir, "/", binary),
                     absl::StrCat("--port_file=", run_dir_, "/", name),
                     "--metrics_listen=127.0.0.1:0"};
  if (options_.tls.enabled()) {
    child.arguments.push_back(absl::StrCat("--tls_cert=", options_.tls.cert_file));
    child.arguments.push_back(absl::StrCat("--tls_key=", options_.tls.key_file));
    child.arguments.push_back(absl::StrCat("--tls_ca=", options_.tls.ca_file));
  }
  child.arguments.insert(child.arguments.end(), flags.begin(), flags.end());
  return ChildProcess::Start(std::move(child));
}

absl::Status LocalSystem::StartWorkers(const char* kind, int32_t count,
                                       const std::vector<std::string>& kind_flags,
                                       std::vector<std::unique_ptr<ChildProcess>>& children) {
  for (int32_t i = 0; i < count; ++i) {
    std::vector<std::string> flags = {"--listen=127.0.0.1:0", "--data_ip=127.0.0.1",
                                      absl::StrCat("--model=", options_.model_dir),
                                      absl::StrCat("--model_name=", model_name_)};
    flags.insert(flags.end(), options_.worker_flags.begin(), options_.worker_flags.end());
    flags.insert(flags.end(), kind_flags.begin(), kind_flags.end());
    ASSIGN_OR_RETURN(auto child, StartChild(absl::StrCat(kind, "-", i),
                                            absl::StrCat("ferry-", kind), std::move(flags)));
    children.push_back(std::move(child));
  }
  return absl::OkStatus();
}

absl::Status LocalSystem::StartRouter() {
  std::vector<std::string> workers;
  for (const auto* group : {&prefills_, &decodes_}) {
    for (const auto& child : *group) {
      ASSIGN_OR_RETURN(std::string address, WaitForAddress(child->name()));
      workers.push_back(std::move(address));
    }
  }
  std::vector<std::string> flags = {
      absl::StrCat("--listen=127.0.0.1:", options_.port),
      absl::StrCat("--workers=", absl::StrJoin(workers, ",")),
      absl::StrCat("--model_assets=", model_name_, "=", options_.model_dir)};
  if (options_.http_port.has_value()) {
    flags.push_back(absl::StrCat("--http_listen=", HttpListen(options_)));
  }
  flags.insert(flags.end(), options_.router_flags.begin(), options_.router_flags.end());
  ASSIGN_OR_RETURN(auto router, StartChild("router", "ferry-router", std::move(flags)));
  routers_.push_back(std::move(router));
  ASSIGN_OR_RETURN(router_address_, WaitForAddress("router"));
  if (options_.http_port.has_value()) {
    ASSIGN_OR_RETURN(http_port_, WaitForPort("router", "http_port"));
  }
  return WaitUntilReady();
}

absl::Status LocalSystem::WaitUntilReady() {
  ASSIGN_OR_RETURN(const auto client, ferry::Client::Create(client_options()));
  std::string last = "the router does not answer";
  while (absl::Now() < ready_deadline_) {
    const absl::Status ready =
        client->CheckReady(model_name_, std::min(kAnswerTimeout, ready_deadline_ - absl::Now()));
    // Other workers than ours, whose flags come from one place, do not appear: so a misfit is
    // final.
    if (ready.ok() || absl::IsFailedPrecondition(ready)) return ready;
    if (absl::IsUnavailable(ready)) last = std::string(ready.message());
    RETURN_IF_ERROR(CheckChildren());
    if (service::WaitForTermination(kPollInterval) != 0) {
      return absl::CancelledError("interrupted while starting");
    }
  }
  return absl::DeadlineExceededError(
      absl::StrCat("not ready after ", absl::FormatDuration(options_.ready_timeout), ": ", last));
}

absl::StatusOr<std::string> LocalSystem::WaitForAddress(const std::string& name) {
  ASSIGN_OR_RETURN(const int32_t port, WaitForPort(name, "grpc_port"));
  std::string address = absl::StrCat("127.0.0.1:", port);
  names_by_address_[address] = name;
  return address;
}

absl::StatusOr<int32_t> LocalSystem::WaitForPort(const std::string& name, const std::string& key) {
  while (absl::Now() < ready_deadline_) {
    std::ifstream file(absl::StrCat(run_dir_, "/", name));
    for (std::string line; std::getline(file, line);) {
      int32_t port = 0;
      absl::string_view rest = line;
      if (absl::ConsumePrefix(&rest, key) && absl::ConsumePrefix(&rest, "=") &&
          absl::SimpleAtoi(rest, &port)) {
        return port;
      }
    }
    RETURN_IF_ERROR(CheckChildren());
    if (service::WaitForTermination(kPollInterval) != 0) {
      return absl::CancelledError("interrupted while starting");
    }
  }
  return absl::DeadlineExceededError(
      absl::StrCat(name, " is not up after ", absl::FormatDuration(options_.ready_timeout)));
}

absl::Status LocalSystem::CheckChildren() {
  for (const auto* group : {&routers_, &prefills_, &decodes_}) {
    for (const auto& child : *group) RETURN_IF_ERROR(child->CheckRunning());
  }
  return absl::OkStatus();
}

absl::Status LocalSystem::WaitForEnd() {
  while (service::WaitForTermination(kSuperviseInterval) == 0) RETURN_IF_ERROR(CheckChildren());
  return absl::OkStatus();
}

void LocalSystem::StopGroup(std::vector<std::unique_ptr<ChildProcess>>& children,
                            std::vector<std::string>& problems) {
  for (const auto& child : children) child->Signal(SIGTERM);
  const absl::Time deadline = absl::Now() + options_.stop_limit;
  for (const auto& child : children) {
    const char* why = "did not end in time";
    while (!child->WaitForExit(kPollInterval)) {
      if (service::WaitForTermination(absl::ZeroDuration()) != 0) {
        why = "was still busy at the second signal";
      } else if (absl::Now() < deadline) {
        continue;
      }
      child->Signal(SIGKILL);
      child->WaitForExit(absl::InfiniteDuration());
      problems.push_back(absl::StrCat(child->name(), " ", why, " and was killed"));
    }
    if (child->wait_status() != 0 && problems.empty()) {
      problems.push_back(std::string(child->CheckRunning().message()));
    }
  }
  children.clear();
}

absl::Status LocalSystem::Stop() {
  std::vector<std::string> problems;
  StopGroup(routers_, problems);
  StopGroup(prefills_, problems);
  StopGroup(decodes_, problems);
  if (problems.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrJoin(problems, "; "));
}

}  // namespace cli

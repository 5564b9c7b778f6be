#include "tests/chaos/gauges.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace chaos {
namespace {

using integration::FerrySystem;
using integration::ReadMetrics;
using integration::SumOf;
using integration::WorkerProcess;

// A connection more or less, a thread that gRPC keeps for a while.
constexpr int kSlack = 4;
constexpr int kReportsBetweenLooks = 5;

// "name is 3; " unless it is `wanted`.
std::string Difference(const std::string& metrics, const std::string& name, double wanted) {
  const std::optional<double> value = SumOf(metrics, name);
  if (value == wanted) return "";
  return absl::StrCat(name, " is ", value.has_value() ? absl::StrCat(*value) : "missing", ", not ",
                      wanted, "; ");
}

}  // namespace

Footprint FootprintOf(pid_t pid) {
  const std::string proc = absl::StrCat("/proc/", pid);
  Footprint footprint;
  std::ifstream status(proc + "/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") {
      status >> footprint.resident_bytes;
      footprint.resident_bytes *= 1024;
    } else if (word == "Threads:") {
      status >> footprint.threads;
    }
  }
  std::error_code error;
  const std::filesystem::directory_iterator descriptors(proc + "/fd", error);
  if (!error) footprint.descriptors = static_cast<int>(std::distance(begin(descriptors), {}));
  return footprint;
}

Gauges::Gauges(FerrySystem& system) : system_(system) {
  const auto remember = [&](const std::string& role, pid_t pid) {
    const Footprint now = FootprintOf(pid);
    Footprint& most = footprints_[role];
    most.threads = std::max(most.threads, now.threads);
    most.descriptors = std::max(most.descriptors, now.descriptors);
  };
  for (const WorkerProcess* worker : system.Living()) {
    blocks_[worker->name] =
        SumOf(ReadMetrics(worker->metrics_port, worker->ip), "ferry_kv_blocks").value_or(-1);
    remember(worker->binary, worker->process.pid());
  }
  remember("router", system.router().pid());
}

std::string Gauges::FootprintDifferences(const std::string& name, const std::string& role,
                                         pid_t pid) const {
  const Footprint& before = footprints_.at(role);
  const Footprint now = FootprintOf(pid);
  std::string differences;
  if (now.threads > before.threads + kSlack) {
    absl::StrAppend(&differences, name, ": ", now.threads, " threads, ", before.threads,
                    " before; ");
  }
  if (now.descriptors > before.descriptors + kSlack) {
    absl::StrAppend(&differences, name, ": ", now.descriptors, " descriptors, ", before.descriptors,
                    " before; ");
  }
  return differences;
}

std::string Gauges::WorkerDifferences(const WorkerProcess& worker) const {
  const std::string metrics = ReadMetrics(worker.metrics_port, worker.ip);
  std::string differences = Difference(metrics, "ferry_kv_blocks", blocks_.at(worker.name));
  for (const char* gauge : {"ferry_requests_running", "ferry_requests_waiting", "ferry_leases",
                            "ferry_transfer_inflight"}) {
    differences += Difference(metrics, gauge, 0);
  }
  for (const char* state : {"active", "reserved", "held", "quarantined"}) {
    differences += Difference(metrics, absl::StrCat("ferry_kv_blocks{state=\"", state, "\"}"), 0);
  }
  if (!differences.empty()) differences = absl::StrCat(worker.name, ": ", differences);
  return differences + FootprintDifferences(worker.name, worker.binary, worker.process.pid());
}

std::string Gauges::Differences() const {
  std::string differences;
  for (const WorkerProcess* worker : system_.Living()) differences += WorkerDifferences(*worker);
  const std::string metrics = ReadMetrics(system_.router_metrics_port(), system_.router_ip());
  for (const char* gauge : {"ferry_router_queue_requests", "ferry_router_queue_bytes",
                            "ferry_router_running_requests"}) {
    differences += Difference(metrics, gauge, 0);
  }
  return differences + FootprintDifferences("router", "router", system_.router().pid());
}

std::string Gauges::WaitUntilBack(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const std::string differences = Differences();
    if (differences.empty() || absl::Now() >= deadline) return differences;
    system_.LetReportsPass(kReportsBetweenLooks);
  }
}

}  // namespace chaos

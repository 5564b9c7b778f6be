#include "tests/chaos/report.h"

#include <sys/utsname.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "status/check.h"

namespace chaos {

namespace {

void Append(const nlohmann::json& line) {
  const char* const path = std::getenv("FERRY_CHAOS_REPORT");
  if (path == nullptr) return;
  std::ofstream file(path, std::ios::app);
  file << line.dump() + "\n";
  file.close();
  FERRY_CHECK(file.good()) << "cannot write " << path;
}

}  // namespace

void ReportFootprint(const std::string& process, const Footprint& last, const Growth& growth) {
  Append({{"suite", "footprint"},
          {"process", process},
          {"resident_bytes", last.resident_bytes},
          {"growth_per_hour", growth.per_hour},
          {"growth_error", growth.error},
          {"descriptors", last.descriptors},
          {"threads", last.threads}});
}

void Report(const std::string& suite, const std::string& fault, int64_t injected, uint64_t seed,
            const Tally& tally) {
  utsname machine;
  FERRY_CHECK(uname(&machine) == 0);
  Append({{"suite", suite},
          {"fault", fault},
          {"injected", injected},
          {"seed", seed},
          {"date", absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone())},
          {"machine", absl::StrCat(machine.sysname, " ", machine.release, " ", machine.machine,
                                   ", ", std::thread::hardware_concurrency(), " cores")},
          {"requests", tally.requests},
          {"endings", tally.endings},
          {"lost", tally.lost},
          {"wrong", tally.wrong},
          {"late", tally.late},
          {"longest_s", absl::ToDoubleSeconds(tally.longest)},
          {"worst_overrun_s", absl::ToDoubleSeconds(tally.worst_overrun)}});
}

int64_t FromEnvironment(const char* name, int64_t value) {
  const char* const text = std::getenv(name);
  if (text != nullptr) FERRY_CHECK(absl::SimpleAtoi(text, &value)) << name << "=" << text;
  return value;
}

}  // namespace chaos

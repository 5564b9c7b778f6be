// Gauges: what a system holds: the gauges that its processes publish, and the kernel's account of
// them.  After any fault they return to where they were.
//
// Thread-compatible.

#ifndef TESTS_CHAOS_GAUGES_H_
#define TESTS_CHAOS_GAUGES_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "tests/integration/ferry_system.h"

namespace chaos {

// Of one process; from /proc.
struct Footprint {
  int64_t resident_bytes = 0;
  int descriptors = 0;
  int threads = 0;
};
Footprint FootprintOf(pid_t pid);

class Gauges final {
 public:
  // Remembers the number of blocks of every worker, and the footprints.  Take it when the system is
  // idle and as warm as it will get: pools of threads grow with the first crowd.
  explicit Gauges(integration::FerrySystem& system);

  // Waits until every published gauge of something in use is 0, all blocks are free or cached, and
  // no process has more threads or descriptors than its like had; "" or what is not so.
  std::string WaitUntilBack(absl::Duration timeout);

 private:
  std::string Differences() const;
  std::string WorkerDifferences(const integration::WorkerProcess& worker) const;
  std::string FootprintDifferences(const std::string& name, const std::string& role,
                                   pid_t pid) const;

  integration::FerrySystem& system_;
  std::map<std::string, double> blocks_;         // by worker
  std::map<std::string, Footprint> footprints_;  // by role: the largest
};

}  // namespace chaos

#endif  // TESTS_CHAOS_GAUGES_H_

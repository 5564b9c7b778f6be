// A load run: holds the conversations of a trace with a server and measures what their users see.
//
// Closed loop: `concurrency` users, each of whom begins a conversation when its last one has ended.
// Open loop (`request_rate` > 0): conversations begin at random times, a Poisson process, however
// slow the server is; their times count from when they were due, also if all `concurrency` users
// were busy then.  Within a conversation a turn follows when the one before it has ended.

#ifndef CLI_LOAD_RUN_H_
#define CLI_LOAD_RUN_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/load_backend.h"
#include "cli/load_clock.h"
#include "cli/load_report.h"
#include "cli/load_trace.h"

namespace cli {

struct LoadOptions {
  int32_t concurrency = 1;
  double request_rate = 0;  // conversations a second; 0: closed loop
  uint64_t seed = 0;        // of arrivals and sampling
  uint32_t vocab_size = 1;  // for answers whose ids the server does not tell
};

// How far a run is.  Written by the run, read by anybody.
struct LoadProgress {
  std::atomic<int32_t> running{0};
  std::atomic<int32_t> good{0};
  std::atomic<int32_t> failed{0};
  std::atomic<int64_t> output_tokens{0};
};

struct LoadResult {
  std::vector<MeasuredRequest> good = {};        // by the time they were due
  std::map<std::string, int32_t> failures = {};  // by code and message
  double seconds = 0;                            // from the first one due to the last end
};

// Returns when every request has ended.  A turn whose predecessor failed is not sent, and counts as
// failed.
LoadResult RunLoad(const Trace& trace, const LoadOptions& options, LoadBackend& backend,
                   LoadClock& clock, LoadProgress& progress);

}  // namespace cli

#endif  // CLI_LOAD_RUN_H_

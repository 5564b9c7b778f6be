// What a load run found: times of each request as its user saw them, and what they come to.
//
// The definitions are those of vLLM's `bench serve`, so that numbers can be compared:
//   TTFT  from when the request was due to its first output
//   ITL   from each message with output to the next, of all requests together
//   TPOT  (E2E - TTFT) / (output tokens - 1), of each request; 0 for a single token
//   E2E   from when the request was due to its last output

#ifndef CLI_LOAD_REPORT_H_
#define CLI_LOAD_REPORT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/latency_stats.h"

namespace cli {

// One request that ended well.
struct MeasuredRequest {
  double due_ms = 0;   // since the run's start
  double late_ms = 0;  // sent so long after it was due
  double ttft_ms = 0;
  double tpot_ms = 0;
  double e2e_ms = 0;
  std::vector<double> itl_ms = {};
  uint32_t num_tokens = 0;  // of output
  bool tokens_told = true;  // else a message counts as one
  std::optional<uint32_t> prompt_tokens = {};
  std::optional<uint32_t> cached_tokens = {};     // of the prompt, as the server says
  std::optional<int32_t> attainable_tokens = {};  // of the prompt, in an earlier request
  std::optional<uint64_t> kv_bytes = {};          // of cache that crossed to the decode worker
};

// What users are promised; 0: nothing.
struct ServiceLevel {
  double ttft_ms = 0;
  double tpot_ms = 0;
  double itl_ms = 0;  // the 99th percentile of the request's own
  double e2e_ms = 0;
  bool any() const { return ttft_ms > 0 || tpot_ms > 0 || itl_ms > 0 || e2e_ms > 0; }
  bool Holds(const MeasuredRequest& request) const;
  std::string Text() const;  // "TTFT 500 ms, TPOT 50 ms"
};

struct LoadReport {
  std::string model = {};
  std::string backend = {};  // "grpc", "openai"
  std::string load = {};     // the trace, in words
  int32_t concurrency = 0;
  double request_rate = 0;  // a second; 0: closed loop
  uint64_t seed = 0;
  ServiceLevel level = {};
  double seconds = 0;
  std::vector<MeasuredRequest> good = {};
  std::map<std::string, int32_t> failures = {};  // by code and message

  int32_t num_failed() const;
  int32_t num_requests() const { return static_cast<int32_t>(good.size()) + num_failed(); }
  int32_t num_within_level() const;
  LatencyStats Stats(double MeasuredRequest::*member) const;
  LatencyStats InterTokenStats() const;
  std::vector<double> Values(double MeasuredRequest::*member) const;
  std::vector<double> InterTokenTimes() const;

  std::string Text() const;  // the table for people
  std::string Json() const;  // one object, without the single requests
};

}  // namespace cli

#endif  // CLI_LOAD_REPORT_H_

// What a load run found: times of each request as its user saw them, and what they come to.

#ifndef CLI_LOAD_REPORT_H_
#define CLI_LOAD_REPORT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cli {

// One request that ended well.  Times start when it was due, also if it was sent later.
struct MeasuredRequest {
  double ttft_ms = 0;               // to the first token
  double tpot_ms = 0;               // a token after the first message; 0 without any
  double total_ms = 0;              // to the end
  std::vector<double> itl_ms = {};  // from each message with tokens to the next, by its tokens
  uint32_t num_tokens = 0;
};

// What users are promised; 0: nothing.
struct ServiceLevel {
  double ttft_ms = 0;
  double tpot_ms = 0;
  bool any() const { return ttft_ms > 0 || tpot_ms > 0; }
  bool Holds(const MeasuredRequest& request) const;
};

struct LoadReport {
  std::string model = {};
  int32_t num_requests = 0;
  int32_t input_tokens = 0;
  int32_t output_tokens = 0;
  int32_t concurrency = 0;
  double request_rate = 0;  // a second; 0: closed loop
  uint64_t seed = 0;
  ServiceLevel level = {};
  double seconds = 0;
  std::vector<MeasuredRequest> good = {};
  std::map<std::string, int32_t> failures = {};  // by code and message

  int32_t num_failed() const;
  int32_t num_within_level() const;
  std::string Text() const;  // the table for people
  std::string Json() const;  // one object, without the single requests
};

}  // namespace cli

#endif  // CLI_LOAD_REPORT_H_

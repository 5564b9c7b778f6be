// Order statistics of measured times.

#ifndef CLI_LATENCY_STATS_H_
#define CLI_LATENCY_STATS_H_

#include <vector>

namespace cli {

struct LatencyStats {
  double mean = 0;
  double median = 0;
  double p90 = 0;
  double p99 = 0;
};

// Zeros for no values.
LatencyStats Summarize(std::vector<double> values);

// The smallest value that at least `share` of the values do not exceed.
// REQUIRES: sorted ascending, not empty; share in (0, 1].
double Percentile(const std::vector<double>& sorted, double share);

}  // namespace cli

#endif  // CLI_LATENCY_STATS_H_

#include "cli/latency_stats.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace cli {

double Percentile(const std::vector<double>& sorted, double share) {
  // Rounding must not turn 0.99 * 100 into 100.
  const auto rank =
      static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size()) - 1e-9));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

LatencyStats Summarize(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {.mean = sum / static_cast<double>(values.size()),
          .median = Percentile(values, 0.5),
          .p90 = Percentile(values, 0.9),
          .p99 = Percentile(values, 0.99)};
}

}  // namespace cli

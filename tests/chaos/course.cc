#include "tests/chaos/course.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace chaos {

Growth Course::MemoryGrowth() const {
  constexpr double kSecondsPerHour = 3600;
  struct Least {
    double seconds, bytes;
  };
  std::vector<Least> parts;
  const size_t first = points.size() / 2, count = points.size() - first;
  for (size_t part = 0; part < kParts; ++part) {
    const size_t begin = first + part * count / kParts, end = first + (part + 1) * count / kParts;
    if (begin == end) continue;
    Least least = {.seconds = 0, .bytes = std::numeric_limits<double>::infinity()};
    for (size_t i = begin; i < end; ++i) {
      least.seconds += points[i].seconds / static_cast<double>(end - begin);
      least.bytes = std::min(least.bytes, static_cast<double>(points[i].footprint.resident_bytes));
    }
    parts.push_back(least);
  }
  const auto n = static_cast<double>(parts.size());
  if (parts.size() < 3) return {.per_hour = 0, .error = std::numeric_limits<double>::infinity()};
  Least mean = {.seconds = 0, .bytes = 0};
  for (const Least& part : parts) mean.seconds += part.seconds / n, mean.bytes += part.bytes / n;
  double tt = 0, tb = 0;
  for (const Least& part : parts) {
    const double t = part.seconds - mean.seconds;
    tt += t * t, tb += t * (part.bytes - mean.bytes);
  }
  const double slope = tb / tt;
  double residuals = 0;
  for (const Least& part : parts) {
    residuals += std::pow(part.bytes - mean.bytes - slope * (part.seconds - mean.seconds), 2);
  }
  const double scale = kSecondsPerHour / mean.bytes;
  return {.per_hour = slope * scale, .error = std::sqrt(residuals / (n - 2) / tt) * scale};
}

}  // namespace chaos

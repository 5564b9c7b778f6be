// Course: what a process held over time, and whether it grows.

#ifndef TESTS_CHAOS_COURSE_H_
#define TESTS_CHAOS_COURSE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/chaos/gauges.h"

namespace chaos {

// As parts of the mean an hour.
struct Growth {
  double per_hour = 0;
  // Its standard error; infinite where too few points say anything.
  double error = 0;

  // More than `limit` an hour, and not by the accidents of the moments that were looked at: a flat
  // course is further than twice the error from its slope once in 40 times.
  bool IsBeyond(double limit) const { return per_hour - 2 * error > limit; }
};

struct Course {
  struct Point {
    double seconds = 0;
    Footprint footprint;
  };

  // Of memory in the second half, by least squares through what was held at the least in each of
  // kParts parts of it.  What is in flight, or free and not given back yet, comes on top of that
  // and goes within a part; neighbouring points would share it, and the error would be too small.
  Growth MemoryGrowth() const;

  static constexpr int kParts = 15;

  std::string name;
  pid_t pid = 0;
  std::vector<Point> points;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_COURSE_H_

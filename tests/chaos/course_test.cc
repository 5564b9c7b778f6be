#include "tests/chaos/course.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace chaos {
namespace {

constexpr double kMebibyte = 1 << 20;
constexpr double kHalfAnHour = 1800;

// Of half an hour, every ten seconds: 30 MiB that grow by `growth` an hour in the second half and
// by 20 % an hour in the first; on top, at random, up to 1 MiB of what is in flight.
Course MakeCourse(double growth, uint32_t seed) {
  std::mt19937 random(seed);
  Course course;
  for (double t = 0; t < kHalfAnHour; t += 10) {
    const double since_half = (t - kHalfAnHour / 2) / 3600;
    const double held = 30 * kMebibyte * (1 + since_half * (since_half < 0 ? 0.2 : growth));
    Footprint footprint;
    footprint.resident_bytes =
        static_cast<int64_t>(held + kMebibyte * static_cast<double>(random() % 1000) / 1000);
    course.points.push_back({.seconds = t, .footprint = footprint});
  }
  return course;
}

TEST(CourseTest, AGrowthIsFoundWithinItsError) {
  for (const double growth : {0.0, 0.05, 0.3, -0.1}) {
    int outside = 0;
    for (uint32_t seed = 1; seed <= 100; ++seed) {
      const Growth found = MakeCourse(growth, seed).MemoryGrowth();
      // A growth of 30 MiB is one of about 30.1.
      if (std::abs(found.per_hour - growth) > 2 * found.error + 0.01 * std::abs(growth)) ++outside;
      EXPECT_LT(found.error, 0.03);
    }
    EXPECT_LE(outside, 15) << growth;
  }
}

TEST(CourseTest, AFlatCourseIsSeldomBeyondALimitAndALeakAlways) {
  int beyond = 0;
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    if (MakeCourse(0, seed).MemoryGrowth().IsBeyond(0.01)) ++beyond;
    EXPECT_TRUE(MakeCourse(0.1, seed).MemoryGrowth().IsBeyond(0.01)) << seed;
  }
  EXPECT_LE(beyond, 3);
}

TEST(CourseTest, FewPointsSayNothing) {
  Course course = MakeCourse(0.3, 1);
  course.points.resize(4);
  EXPECT_FALSE(course.MemoryGrowth().IsBeyond(0.01));
  EXPECT_TRUE(std::isinf(course.MemoryGrowth().error));
  course.points.clear();
  EXPECT_FALSE(course.MemoryGrowth().IsBeyond(0.01));
}

}  // namespace
}  // namespace chaos

// The comparison of float tensors in tests; there is no other.
//
//   EXPECT_TRUE(numerics::AllClose(actual, expected, {.abs = 1e-6, .rel = 1e-5, .cosine = 1e-9}));
//
// Passes if NaN and infinities stand at the same places (infinities with the same sign), every
// finite element is within `abs` OR within `rel` of the expected one, and 1 - cosine similarity
// over all finite elements is at most `cosine`.  A failure prints how many elements failed and the
// worst of each kind. BitEqual is for results that are promised to be the same bits (NaN equals the
// same NaN, 0 is not -0).

#ifndef TESTS_NUMERICS_COMPARE_H_
#define TESTS_NUMERICS_COMPARE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace numerics {

struct Tolerance {
  double abs = 0;
  double rel = 0;
  double cosine = 1;  // 1: not looked at
};

// Expected may be double (a reference) or float.
template <typename Expected>
::testing::AssertionResult AllClose(absl::Span<const float> actual,
                                    absl::Span<const Expected> expected,
                                    const Tolerance& tolerance) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << "sizes differ: actual " << actual.size() << ", expected " << expected.size();
  }
  struct Worst {
    double value = -1;
    size_t index = 0;
    void Take(double candidate, size_t i) {
      if (candidate > value) *this = {candidate, i};
    }
  };
  Worst worst_abs, worst_rel;
  size_t num_failed = 0, num_special = 0, first_special = 0;
  double dot = 0, actual_norm = 0, expected_norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], e = expected[i];
    if (!std::isfinite(a) || !std::isfinite(e)) {
      const bool same = (std::isnan(a) && std::isnan(e)) || a == e;
      if (!same && num_special++ == 0) first_special = i;
      continue;
    }
    const double abs_error = std::abs(a - e);
    // 0 against 0 has no relative error; anything against 0 has an infinite one.
    const double rel_error = abs_error == 0 ? 0
                             : e == 0       ? std::numeric_limits<double>::infinity()
                                            : abs_error / std::abs(e);
    if (abs_error > tolerance.abs && rel_error > tolerance.rel) {
      ++num_failed;
      worst_abs.Take(abs_error, i);
      worst_rel.Take(rel_error, i);
    }
    dot += a * e;
    actual_norm += a * a;
    expected_norm += e * e;
  }
  const double norms = actual_norm * expected_norm;
  const double cosine_difference =
      norms > 0 ? 1 - dot / std::sqrt(norms) : (actual_norm == expected_norm ? 0 : 1);
  const bool cosine_failed = cosine_difference > tolerance.cosine;
  if (num_failed == 0 && num_special == 0 && !cosine_failed) {
    return ::testing::AssertionSuccess();
  }
  auto result = ::testing::AssertionFailure();
  result << num_failed << " of " << actual.size() << " elements are off";
  const auto show = [&](const char* name, double value, size_t i) {
    result << "\n  " << name << " " << value << " at [" << i << "]: actual " << actual[i]
           << ", expected " << expected[i];
  };
  if (num_failed > 0) {
    show("worst abs error", worst_abs.value, worst_abs.index);
    show("worst rel error", worst_rel.value, worst_rel.index);
  }
  if (num_special > 0) {
    show("NaN or infinity differs, elements:", static_cast<double>(num_special), first_special);
  }
  if (cosine_failed) {
    result << "\n  cosine difference " << cosine_difference << " > " << tolerance.cosine;
  }
  return result;
}

// For containers: std::vector<float>, arrays.
template <typename Actual, typename Expected>
::testing::AssertionResult AllClose(const Actual& actual, const Expected& expected,
                                    const Tolerance& tolerance) {
  using Element = std::remove_cv_t<std::remove_reference_t<decltype(expected[0])>>;
  return AllClose(absl::Span<const float>(actual), absl::Span<const Element>(expected), tolerance);
}

inline ::testing::AssertionResult BitEqual(absl::Span<const float> actual,
                                           absl::Span<const float> expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << "sizes differ: actual " << actual.size() << ", expected " << expected.size();
  }
  size_t num_failed = 0, first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(float)) != 0 && num_failed++ == 0) first = i;
  }
  if (num_failed == 0) return ::testing::AssertionSuccess();
  uint32_t actual_bits, expected_bits;
  std::memcpy(&actual_bits, &actual[first], sizeof(actual_bits));
  std::memcpy(&expected_bits, &expected[first], sizeof(expected_bits));
  return ::testing::AssertionFailure()
         << num_failed << " of " << actual.size() << " elements differ in their bits, first at ["
         << first << "]: actual " << actual[first] << " (" << std::hex << "0x" << actual_bits
         << "), expected " << std::dec << expected[first] << " (" << std::hex << "0x"
         << expected_bits << ")";
}

}  // namespace numerics

#endif  // TESTS_NUMERICS_COMPARE_H_

#include "router/tenant_rates.h"

#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"

namespace router {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

int TakenAt(TenantRates* rates, const std::string& tenant, double rate, absl::Time now) {
  int taken = 0;
  while (rates->Take(tenant, rate, now) == absl::ZeroDuration()) ++taken;
  return taken;
}

TEST(TenantRatesTest, ASecondsWorthIsSavedUpAndNoMore) {
  TenantRates rates;
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow), 5);
  EXPECT_EQ(rates.Take("a", 5, kNow), absl::Milliseconds(200));
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(199)), 0);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(200)), 1);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(600)), 2);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Hours(1)), 5);
}

TEST(TenantRatesTest, LessThanOneASecondIsOneInSeveral) {
  TenantRates rates;
  EXPECT_EQ(TakenAt(&rates, "a", 0.25, kNow), 1);
  EXPECT_EQ(rates.Take("a", 0.25, kNow + absl::Seconds(1)), absl::Seconds(3));
  EXPECT_EQ(TakenAt(&rates, "a", 0.25, kNow + absl::Seconds(4)), 1);
}

TEST(TenantRatesTest, OneRequestPassesHoweverLowTheRate) {
  for (const double rate : {1e-12, 1e-300, std::numeric_limits<double>::denorm_min()}) {
    TenantRates rates;
    EXPECT_EQ(TakenAt(&rates, "a", rate, kNow), 1) << rate;
    EXPECT_LT(rates.Take("a", rate, kNow), absl::InfiniteDuration()) << rate;
  }
}

TEST(TenantRatesTest, TenantsDoNotCountForEachOther) {
  TenantRates rates;
  EXPECT_EQ(TakenAt(&rates, "a", 2, kNow), 2);
  EXPECT_EQ(TakenAt(&rates, "b", 3, kNow), 3);
  EXPECT_EQ(TakenAt(&rates, "", 1, kNow), 1);
}

TEST(TenantRatesTest, WhoHasNotComeForLongIsForgotten) {
  TenantRates rates;
  for (int i = 0; i < 100000; ++i) {
    EXPECT_EQ(rates.Take(absl::StrCat(i), 1, kNow + i * absl::Milliseconds(10)),
              absl::ZeroDuration());
  }
  EXPECT_LE(rates.num_known(), 1024u);
}

}  // namespace
}  // namespace router

#include "router/tenant_rates.h"

#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"

namespace router {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

int TakenAt(TenantRates* rates, const std::string& tenant, double rate, absl::Time now) {
  int taken = 0;
  while (rates->Take(tenant, rate, 1, now) == absl::ZeroDuration()) ++taken;
  return taken;
}

TEST(TenantRatesTest, ASecondsWorthIsSavedUpAndNoMore) {
  TenantRates rates;
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow), 5);
  EXPECT_EQ(rates.Take("a", 5, 1, kNow), absl::Milliseconds(200));
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(199)), 0);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(200)), 1);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Milliseconds(600)), 2);
  EXPECT_EQ(TakenAt(&rates, "a", 5, kNow + absl::Hours(1)), 5);
}

TEST(TenantRatesTest, LessThanOneASecondIsOneInSeveral) {
  TenantRates rates;
  EXPECT_EQ(TakenAt(&rates, "a", 0.25, kNow), 1);
  EXPECT_EQ(rates.Take("a", 0.25, 1, kNow + absl::Seconds(1)), absl::Seconds(3));
  EXPECT_EQ(TakenAt(&rates, "a", 0.25, kNow + absl::Seconds(4)), 1);
}

TEST(TenantRatesTest, OneRequestPassesHoweverLowTheRate) {
  for (const double rate : {1e-12, 1e-300, std::numeric_limits<double>::denorm_min()}) {
    TenantRates rates;
    EXPECT_EQ(TakenAt(&rates, "a", rate, kNow), 1) << rate;
    EXPECT_LT(rates.Take("a", rate, 1, kNow), absl::InfiniteDuration()) << rate;
  }
}

TEST(TenantRatesTest, ACallOfAnyNumberOfRequestsPassesWhenAllIsSavedAndIsPaidForBehind) {
  TenantRates rates;
  EXPECT_EQ(rates.Take("a", 5, 3, kNow), absl::ZeroDuration());
  EXPECT_EQ(rates.Take("a", 5, 3, kNow), absl::Milliseconds(200)) << "two are left";
  EXPECT_EQ(rates.Take("a", 5, 100, kNow), absl::Milliseconds(600)) << "until all is saved";
  EXPECT_EQ(rates.Take("a", 5, 100, kNow + absl::Milliseconds(599)), absl::Milliseconds(1));
  EXPECT_EQ(rates.Take("a", 5, 100, kNow + absl::Milliseconds(600)), absl::ZeroDuration());
  const absl::Time paid = kNow + absl::Milliseconds(600) + absl::Seconds(19);
  EXPECT_EQ(rates.Take("a", 5, 1, paid), absl::Milliseconds(200)) << "100 at 5 a second";
  EXPECT_EQ(rates.Take("a", 5, 1, paid + absl::Milliseconds(200)), absl::ZeroDuration());
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
    EXPECT_EQ(rates.Take(absl::StrCat(i), 1, 1, kNow + i * absl::Milliseconds(10)),
              absl::ZeroDuration());
  }
  EXPECT_LE(rates.num_known(), 1024u);
}

TEST(TenantRatesTest, InventedNamesAreForgottenAndThoseInDebtLast) {
  TenantRates rates;
  EXPECT_EQ(rates.Take("in debt", 0.001, 10, kNow), absl::ZeroDuration());
  for (int i = 0; i < 300000; ++i) rates.Take(absl::StrCat(i), 0.001, 1, kNow);
  EXPECT_LE(rates.num_known(), TenantRates::kMaxKnown);
  EXPECT_GT(rates.Take("in debt", 0.001, 1, kNow), absl::ZeroDuration());
}

}  // namespace
}  // namespace router

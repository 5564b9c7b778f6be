#include "router/load_ledger.h"

#include "gtest/gtest.h"

namespace router {
namespace {

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);
const LoadLedger::Load kLoad = {
    .prefill_tokens = 100, .requests = 1, .kv_blocks = 4, .growth_blocks = 2};

TEST(LoadLedgerTest, AChargeIsSeenAtOnceAndGivenBackOnce) {
  LoadLedger ledger;
  const auto a = ledger.Charge(3, kLoad, kStart);
  ledger.Charge(3, kLoad, kStart);
  EXPECT_EQ(ledger.uncommitted(3).prefill_tokens, 200);
  EXPECT_EQ(ledger.uncommitted(3).requests, 2);
  EXPECT_EQ(ledger.uncommitted(0), LoadLedger::Load());
  ledger.Release(a);
  ledger.Release(a);
  ledger.Release(0);
  EXPECT_EQ(ledger.uncommitted(3), kLoad);
  EXPECT_EQ(ledger.num_charges(), 1u);
}

TEST(LoadLedgerTest, ReportsTakeOverOnlyWhatTheWorkerHasAccepted) {
  LoadLedger ledger;
  const auto accepted = ledger.Charge(0, kLoad, kStart);
  const auto pending = ledger.Charge(0, kLoad, kStart);
  ledger.OnReport(0);
  ledger.OnReport(0);
  EXPECT_EQ(ledger.uncommitted(0).prefill_tokens, 200) << "nobody has accepted anything";
  ledger.Commit(accepted);
  ledger.OnReport(0);  // may have been written before
  EXPECT_EQ(ledger.uncommitted(0).prefill_tokens, 200);
  ledger.OnReport(0);
  EXPECT_EQ(ledger.uncommitted(0).prefill_tokens, 100);
  EXPECT_EQ(ledger.uncommitted(0).growth_blocks, 4) << "no report shows what will grow";
  ledger.Release(accepted);
  ledger.OnReport(0);
  EXPECT_EQ(ledger.uncommitted(0), kLoad);
  ledger.Commit(pending);
  ledger.Release(pending);
  ledger.OnReport(0);
  ledger.OnReport(0);
  EXPECT_EQ(ledger.uncommitted(0), LoadLedger::Load());
}

TEST(LoadLedgerTest, ARequestIsInFlightFromItsChargeToItsReleaseWhateverReportsShow) {
  LoadLedger ledger;
  EXPECT_EQ(ledger.requests_in_flight(0), 0);
  const auto a = ledger.Charge(0, {.requests = 3}, kStart);
  const auto b = ledger.Charge(0, kLoad, kStart);
  ledger.Commit(a);
  for (int i = 0; i < 3; ++i) ledger.OnReport(0);
  EXPECT_EQ(ledger.uncommitted(0).requests, 1);
  EXPECT_EQ(ledger.requests_in_flight(0), 4);
  ledger.Release(a);
  EXPECT_EQ(ledger.requests_in_flight(0), 1);
  ledger.Release(b);
  EXPECT_EQ(ledger.requests_in_flight(0), 0);
}

// A worker does not look busy, until its next report, with what it has done.
TEST(LoadLedgerTest, WhatTheLastReportShowsOfAnEndedRequestIsCredited) {
  const LoadLedger::Load shown = {.prefill_tokens = -100, .requests = -1, .kv_blocks = -4};
  for (int reports = 0; reports <= 3; ++reports) {
    LoadLedger ledger;
    const auto charge = ledger.Charge(0, kLoad, kStart);
    ledger.Commit(charge);
    for (int i = 0; i < reports; ++i) ledger.OnReport(0);
    ledger.Release(charge);
    EXPECT_EQ(ledger.uncommitted(0), reports == 0 ? LoadLedger::Load() : shown) << reports;
    ledger.OnReport(0);
    EXPECT_EQ(ledger.uncommitted(0), LoadLedger::Load()) << reports;
  }
}

TEST(LoadLedgerTest, RecentAssignmentsFade) {
  LoadLedger ledger;
  ledger.Release(ledger.Charge(1, kLoad, kStart));
  EXPECT_DOUBLE_EQ(ledger.recent_assignments(1, kStart), 1.0);
  EXPECT_EQ(ledger.recent_assignments(0, kStart), 0.0);
  ledger.Charge(1, kLoad, kStart);
  EXPECT_DOUBLE_EQ(ledger.recent_assignments(1, kStart), 2.0);
  EXPECT_LT(ledger.recent_assignments(1, kStart + absl::Seconds(20)), 0.001);
}

}  // namespace
}  // namespace router

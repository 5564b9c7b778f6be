#include "router/admission.h"

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"

namespace router {
namespace {

using Entry = AdmissionQueue::Entry;
using Visit = AdmissionQueue::Visit;
using testing::ElementsAre;

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

Entry Make(int64_t arrival, int32_t priority = 0, const std::string& model = "m",
           int64_t bytes = 10) {
  return {.model = model,
          .priority = priority,
          .arrival = arrival,
          .since = kNow,
          .tokens = 100,
          .bytes = bytes};
}

Entry Of(const std::string& tenant, int64_t arrival, int64_t tokens = 100) {
  Entry entry = Make(arrival);
  entry.tenant = tenant;
  entry.tokens = tokens;
  return entry;
}

std::vector<int64_t> Order(AdmissionQueue* queue, Visit answer, absl::Time now = kNow) {
  std::vector<int64_t> order;
  queue->ForEach(now, [&](Entry* entry) {
    order.push_back(entry->arrival);
    return answer;
  });
  return order;
}

TEST(AdmissionQueueTest, HigherPriorityFirstThenArrival) {
  AdmissionQueue queue({});
  Entry a = Make(1), b = Make(2, 5), c = Make(3, 5), d = Make(4, -1);
  for (Entry* entry : {&d, &c, &b, &a}) ASSERT_TRUE(queue.Enter(entry).ok());
  EXPECT_THAT(Order(&queue, Visit::kSkip), ElementsAre(2, 3, 1, 4));
  EXPECT_THAT(Order(&queue, Visit::kNoRoom), ElementsAre(2)) << "nobody overtakes";
  EXPECT_EQ(queue.num_requests(), 4);
  EXPECT_THAT(Order(&queue, Visit::kTaken), ElementsAre(2, 3, 1, 4));
  EXPECT_EQ(queue.num_requests(), 0);
  EXPECT_EQ(queue.num_bytes(), 0);
}

TEST(AdmissionQueueTest, ACallIsAdmittedOrRefusedWhole) {
  AdmissionQueue queue({.max_requests = 6,
                        .max_bytes = 100,
                        .tenants = {{"slow", {.max_rate = 0.5}}, {"short", {.max_queued = 3}}}});
  int64_t arrival = 0;
  std::vector<std::unique_ptr<Entry>> entries;
  // How many of a call's requests get in, and what the others are told.
  const auto enter = [&](const std::string& tenant, int64_t count, absl::Time now, int64_t bytes,
                         absl::Status* refusal) {
    const auto call = std::make_shared<RequestCall>(
        RequestCall{.num_requests = count, .num_bytes = count * bytes});
    int64_t entered = 0;
    for (int64_t i = 0; i < count; ++i) {
      entries.push_back(std::make_unique<Entry>(Of(tenant, ++arrival)));
      entries.back()->since = now;
      entries.back()->bytes = bytes;
      entries.back()->call = call;
      const absl::Status status = queue.Enter(entries.back().get());
      entered += status.ok();
      if (!status.ok()) *refusal = status;
    }
    return entered;
  };
  absl::Status refusal;
  EXPECT_EQ(enter("slow", 4, kNow, 1, &refusal), 4) << "more than are ever saved";
  EXPECT_EQ(enter("slow", 2, kNow + absl::Seconds(7), 1, &refusal), 0);
  EXPECT_EQ(status::RetryAfter(refusal), absl::Seconds(1));
  EXPECT_EQ(enter("short", 1, kNow, 1, &refusal), 1);
  EXPECT_EQ(enter("short", 3, kNow, 1, &refusal), 0);
  EXPECT_EQ(refusal.message(), "tenant short: 1 requests wait, 3 more pass the limit of 3");
  queue.Leave(entries[entries.size() - 4].get());
  EXPECT_EQ(enter("b", 3, kNow, 1, &refusal), 0);
  EXPECT_EQ(refusal.message(), "queue is full: 4 requests wait, 3 more pass the limit of 6");
  EXPECT_EQ(enter("b", 2, kNow, 49, &refusal), 0);
  EXPECT_EQ(refusal.message(), "queue is full: 4 bytes wait, 98 more pass the limit of 100");
  EXPECT_EQ(enter("slow", 2, kNow + absl::Seconds(8), 1, &refusal), 2);
  EXPECT_EQ(queue.num_requests(), 6);
}

// To come back later would not help.
TEST(AdmissionQueueTest, ACallThatNoEmptyQueueHasRoomForIsWrong) {
  AdmissionQueue queue(
      {.max_requests = 6, .max_bytes = 100, .tenants = {{"a", {.max_queued = 3}}}});
  const auto enter = [&](const std::string& tenant, int64_t count, int64_t bytes) {
    Entry entry = Of(tenant, 1);
    entry.bytes = bytes;
    entry.call =
        std::make_shared<RequestCall>(RequestCall{.num_requests = count, .num_bytes = bytes});
    const absl::Status status = queue.Enter(&entry);
    queue.Ended(&entry);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(status::Reason(status), status::kCallTooLarge);
    }
    return std::string(status.message());
  };
  EXPECT_EQ(enter("a", 3, 100), "");
  EXPECT_EQ(enter("a", 4, 1),
            "prompt has 4 entries: at most 3 requests of tenant a may wait at a time, and each "
            "entry is one");
  EXPECT_EQ(enter("", 6, 1), "");
  EXPECT_EQ(enter("", 7, 1),
            "prompt has 7 entries: at most 6 requests may wait at a time, and each entry is one");
  EXPECT_EQ(enter("", 1, 101), "prompt has 101 bytes in the queue: at most 100 may wait at a time");
}

TEST(AdmissionQueueTest, InventedTenantsAreForgottenThoughTheQueueIsNeverEmpty) {
  AdmissionQueue queue({});
  Entry waits = Make(0);
  ASSERT_TRUE(queue.Enter(&waits).ok());
  for (int64_t i = 1; i < 10000; ++i) {
    Entry one = Of(std::to_string(i), i);
    ASSERT_TRUE(queue.Enter(&one).ok());
    queue.ForEach(kNow, [&](Entry* entry) { return entry == &one ? Visit::kTaken : Visit::kSkip; });
    queue.Ended(&one);
  }
  EXPECT_LE(queue.num_lanes("m"), AdmissionQueue::kMaxIdleLanes + 1);
}

TEST(AdmissionQueueTest, IsBoundedByCountAndBytesButTakesBackWhatItHadAdmitted) {
  AdmissionQueue queue({.max_requests = 2, .max_bytes = 100});
  Entry a = Make(1), b = Make(2, 0, "m", 95), c = Make(3, 0, "m", 80), d = Make(4);
  ASSERT_TRUE(queue.Enter(&a).ok());
  const absl::Status bytes = queue.Enter(&b);
  EXPECT_EQ(bytes.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(bytes), status::kQueueFull);
  ASSERT_TRUE(queue.Enter(&c).ok());
  const absl::Status count = queue.Enter(&d);
  EXPECT_EQ(count.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(count), status::kQueueFull);
  queue.Return(&d);
  EXPECT_EQ(queue.num_requests(), 3);
}

TEST(AdmissionQueueTest, ModelsDoNotBlockEachOtherAndBackOffIsLeftAlone) {
  AdmissionQueue queue({});
  Entry a = Make(1, 0, "a"), b = Make(2, 0, "b"), c = Make(3, 0, "b");
  b.not_before = kNow + absl::Seconds(1);
  for (Entry* entry : {&a, &b, &c}) ASSERT_TRUE(queue.Enter(entry).ok());
  EXPECT_THAT(Order(&queue, Visit::kNoRoom), testing::UnorderedElementsAre(1, 3));
  EXPECT_THAT(Order(&queue, Visit::kNoRoom, b.not_before), testing::UnorderedElementsAre(1, 2));
}

TEST(AdmissionQueueTest, OneLookSkipsOnlySoMany) {
  AdmissionQueue queue({});
  std::vector<Entry> entries;
  for (int i = 0; i < 200; ++i) entries.push_back(Make(i));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  EXPECT_EQ(Order(&queue, Visit::kSkip).size(), size_t{AdmissionQueue::kMaxSkips});
  EXPECT_EQ(Order(&queue, Visit::kTaken).size(), 200u);
}

// However many wait for something that a later one does not need.
TEST(AdmissionQueueTest, WhoCanGoIsFoundBehindAnyNumberWhoWait) {
  AdmissionQueue queue({});
  std::vector<Entry> entries;
  for (int i = 0; i < 1000; ++i) entries.push_back(Make(i));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  const auto visit = [](Entry* entry) {
    return entry->arrival < 999 ? Visit::kSkip : Visit::kTaken;
  };
  int looks = 0;
  while (queue.num_requests() == 1000 && looks < 100) {
    bool oldest_first = false;
    int visited = 0;
    queue.ForEach(kNow, [&](Entry* entry) {
      oldest_first |= visited == 0 && entry->arrival == 0;
      ++visited;
      return visit(entry);
    });
    EXPECT_TRUE(oldest_first) << "the oldest has the first chance at every look";
    EXPECT_LE(visited, AdmissionQueue::kMaxSkips + 1);
    ++looks;
  }
  EXPECT_EQ(queue.num_requests(), 999);
  EXPECT_LE(looks, 1000 / (AdmissionQueue::kMaxSkips / 2));
  // The next round begins behind the head again, not at the end.
  EXPECT_THAT(Order(&queue, Visit::kSkip), testing::Contains(40));
}

TEST(AdmissionQueueTest, LeavingTwiceIsHarmless) {
  AdmissionQueue queue({});
  Entry a = Make(1);
  ASSERT_TRUE(queue.Enter(&a).ok());
  EXPECT_TRUE(queue.Leave(&a));
  EXPECT_FALSE(queue.Leave(&a));
  EXPECT_EQ(queue.num_requests(), 0);
}

// Each level of priority is worth so much waiting: nobody is overtaken for ever.
TEST(AdmissionQueueTest, WaitingRaisesAPriority) {
  AdmissionQueue queue({.ageing = absl::Seconds(5)});
  Entry old_one = Make(1, 0), soon = Make(2, 2), late = Make(3, 2);
  old_one.since = kNow;
  soon.since = kNow + absl::Seconds(9);
  late.since = kNow + absl::Seconds(11);
  for (Entry* entry : {&old_one, &soon, &late}) ASSERT_TRUE(queue.Enter(entry).ok());
  EXPECT_THAT(Order(&queue, Visit::kSkip), ElementsAre(2, 1, 3));
}

// However many urgent ones keep coming, one each second: a low one goes when its age outweighs
// them.
TEST(AdmissionQueueTest, ALowPriorityIsNeverStarved) {
  AdmissionQueue queue({.ageing = absl::Seconds(5)});
  std::vector<Entry> urgent;
  for (int i = 0; i < 200; ++i) {
    urgent.push_back(Make(10 + i, 10));
    urgent.back().since = kNow + absl::Seconds(i);
  }
  Entry low = Make(1, 0);
  ASSERT_TRUE(queue.Enter(&low).ok());
  int served = 0;
  bool low_went = false;
  for (; served < 200 && !low_went; ++served) {
    ASSERT_TRUE(queue.Enter(&urgent[served]).ok());
    bool one = false;
    queue.ForEach(kNow + absl::Seconds(served), [&](Entry* entry) {
      if (one) return Visit::kNoRoom;  // room for one of them at each look
      one = true;
      low_went = entry == &low;
      return Visit::kTaken;
    });
  }
  EXPECT_TRUE(low_went);
  EXPECT_EQ(served, 51) << "10 levels of 5 s";
}

// Shares are of tokens, not of requests, and by tenant, not by how much one of them asks.
TEST(AdmissionQueueTest, TenantsShareEquallyWhateverTheyAskFor) {
  AdmissionQueue queue({});
  std::vector<Entry> entries;
  for (int i = 0; i < 20; ++i) entries.push_back(Of("greedy", i));
  for (int i = 0; i < 4; ++i) entries.push_back(Of("large", 100 + i, 300));
  for (int i = 0; i < 2; ++i) entries.push_back(Of("", 200 + i));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  std::map<std::string, int64_t> tokens;
  int left = 14;
  queue.ForEach(kNow, [&](Entry* entry) {
    if (left-- == 0) return Visit::kNoRoom;
    tokens[entry->tenant] += entry->tokens;
    return Visit::kTaken;
  });
  EXPECT_EQ(tokens[""], 200) << "all that it wanted";
  EXPECT_LE(std::abs(tokens["greedy"] - tokens["large"]), 300);
  EXPECT_GE(tokens["large"], 600);
}

TEST(AdmissionQueueTest, ATenantThatComesNewlyStartsLevelWithTheOthers) {
  AdmissionQueue queue({});
  std::vector<Entry> entries;
  for (int i = 0; i < 40; ++i) entries.push_back(Of("old", i));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  int left = 20;
  queue.ForEach(kNow, [&](Entry*) { return left-- > 0 ? Visit::kTaken : Visit::kNoRoom; });
  std::vector<Entry> newer;
  for (int i = 0; i < 20; ++i) newer.push_back(Of("new", 100 + i));
  for (Entry& entry : newer) ASSERT_TRUE(queue.Enter(&entry).ok());
  std::map<std::string, int> count;
  left = 10;
  queue.ForEach(kNow, [&](Entry* entry) {
    if (left-- == 0) return Visit::kNoRoom;
    ++count[entry->tenant];
    return Visit::kTaken;
  });
  EXPECT_THAT(count["old"], testing::AllOf(testing::Ge(4), testing::Le(6)));
}

TEST(AdmissionQueueTest, ATenantHasOnlySoManyAtWorkersAndSoManyWaiting) {
  AdmissionQueue queue({.tenant = {.max_running = 2, .max_queued = 3},
                        .tenants = {{"vip", {.max_running = 0, .max_queued = 0}}}});
  std::vector<Entry> entries;
  for (int i = 0; i < 3; ++i) entries.push_back(Of("a", i));
  for (int i = 0; i < 5; ++i) entries.push_back(Of("vip", 10 + i));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  Entry fourth = Of("a", 9);
  const absl::Status refused = queue.Enter(&fourth);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(refused), status::kTenantLimit);
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("tenant a: 3 requests wait"));

  EXPECT_THAT(Order(&queue, Visit::kTaken),
              testing::UnorderedElementsAre(0, 1, 10, 11, 12, 13, 14));
  EXPECT_THAT(Order(&queue, Visit::kTaken), ElementsAre()) << "the third of a waits";
  // One that comes back from a worker is not held up by its own seat.
  queue.Return(&entries[0]);
  EXPECT_THAT(Order(&queue, Visit::kTaken), ElementsAre(0));
  const auto uses = queue.UseByTenant();
  ASSERT_EQ(uses.size(), 2u);
  EXPECT_EQ(uses[0].name, "vip");
  EXPECT_EQ(uses[0].running, 5);
  EXPECT_EQ(uses[1].name, "other");
  EXPECT_EQ(uses[1].running, 2);
  EXPECT_EQ(uses[1].queued, 1);
  queue.Ended(&entries[1]);
  EXPECT_THAT(Order(&queue, Visit::kTaken), ElementsAre(2));
  for (Entry& entry : entries) queue.Ended(&entry);
  for (const auto& use : queue.UseByTenant()) EXPECT_EQ(use.running + use.queued, 0) << use.name;
}

TEST(AdmissionQueueTest, WhoIsRefusedAtItsTurnHasHadNothing) {
  AdmissionQueue queue({.tenant = {.max_running = 1}});
  std::vector<Entry> entries;
  for (int i = 0; i < 5; ++i) entries.push_back(Of("late", i));
  entries.push_back(Of("other", 10));
  for (Entry& entry : entries) ASSERT_TRUE(queue.Enter(&entry).ok());
  const auto refuse_all_but_the_last = [](Entry* entry) {
    return entry->arrival < 4 ? Visit::kRefused : Visit::kNoRoom;
  };
  queue.ForEach(kNow, refuse_all_but_the_last);
  EXPECT_EQ(queue.num_requests(), 2);
  const auto uses = queue.UseByTenant();
  EXPECT_EQ(uses[0].running, 0);
  EXPECT_EQ(uses[0].queued, 2);
  EXPECT_THAT(Order(&queue, Visit::kTaken), ElementsAre(4, 10))
      << "level with the other tenant, and its seat is free";
  for (Entry& entry : entries) queue.Ended(&entry);
  for (const auto& use : queue.UseByTenant()) EXPECT_EQ(use.running + use.queued, 0) << use.name;
}

TEST(AdmissionQueueTest, TokensBeforeCountWhatGoesFirst) {
  AdmissionQueue queue({});
  Entry a = Of("a", 1, 500), b = Of("a", 2, 100), c = Of("b", 3, 1000);
  EXPECT_EQ(queue.TokensBefore(a, true), 0);
  for (Entry* entry : {&a, &b, &c}) ASSERT_TRUE(queue.Enter(entry).ok());
  EXPECT_EQ(queue.TokensBefore(Of("a", 4, 100), true), 0) << "nobody has had to wait yet";
  EXPECT_FALSE(queue.has_line("m"));
  Order(&queue, Visit::kNoRoom);
  EXPECT_TRUE(queue.has_line("m"));
  for (const bool waits_in_line : {false, true}) {
    EXPECT_EQ(queue.TokensBefore(Of("a", 4, 100), waits_in_line), 600 + 700)
        << "b gets as much as a meanwhile";
    EXPECT_EQ(queue.TokensBefore(Of("c", 4, 100), waits_in_line), 200);
    Entry urgent = Of("a", 5, 50);
    urgent.priority = 1;
    EXPECT_EQ(queue.TokensBefore(urgent, waits_in_line), 50) << "before all of its tenant";
  }
}

TEST(AdmissionQueueTest, WhoNeedsNoneOfWhatOthersWaitForIsBehindNobody) {
  AdmissionQueue queue({});
  Entry skipped = Make(1), away = Make(2), fresh = Make(4);
  for (Entry* entry : {&skipped, &away}) ASSERT_TRUE(queue.Enter(entry).ok());
  queue.ForEach(kNow,
                [&](Entry* entry) { return entry == &skipped ? Visit::kSkip : Visit::kAway; });
  EXPECT_TRUE(queue.has_line("m"));
  EXPECT_EQ(queue.TokensBefore(fresh, /*waits_in_line=*/false), 0);
  EXPECT_EQ(queue.TokensBefore(fresh, /*waits_in_line=*/true), 100) << "not whom nobody can serve";
  queue.Leave(&skipped);
  Order(&queue, Visit::kAway);
  EXPECT_FALSE(queue.has_line("m"));
}

// The queue against a plain list, in random histories: nobody is lost, counted twice or left in.
TEST(AdmissionQueueTest, RandomHistoriesKeepEveryCount) {
  std::mt19937 random(std::random_device{}());
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  AdmissionQueue queue({.max_requests = 40, .tenant = {.max_running = 3, .max_queued = 8}});
  std::vector<std::unique_ptr<Entry>> queued, running;
  const auto drop = [](std::vector<std::unique_ptr<Entry>>* from, size_t i) {
    std::unique_ptr<Entry> entry = std::move((*from)[i]);
    from->erase(from->begin() + static_cast<int64_t>(i));
    return entry;
  };
  for (int step = 0; step < 5000; ++step) {
    switch (below(5)) {
      case 0:
      case 1: {
        auto entry = std::make_unique<Entry>(Of(std::string(1, 'a' + below(4)), step, below(300)));
        entry->priority = below(5) - 2;
        entry->since = kNow + absl::Seconds(step);
        if (queue.Enter(entry.get()).ok()) queued.push_back(std::move(entry));
        break;
      }
      case 2: {
        std::vector<std::unique_ptr<Entry>> refused;
        queue.ForEach(kNow + absl::Seconds(step), [&](Entry* entry) {
          const Visit visit = Visit(below(5));
          if (visit != Visit::kTaken && visit != Visit::kRefused) return visit;
          auto& to = visit == Visit::kTaken ? running : refused;
          for (size_t i = 0; i < queued.size(); ++i) {
            if (queued[i].get() == entry) to.push_back(drop(&queued, i));
          }
          return visit;
        });
        for (const auto& entry : refused) EXPECT_FALSE(queue.Ended(entry.get()));
        break;
      }
      case 3:
        if (running.empty()) break;
        if (const size_t i = below(static_cast<int>(running.size())); below(3) == 0) {
          queue.Return(running[i].get());
          queued.push_back(drop(&running, i));
        } else {
          EXPECT_FALSE(queue.Ended(running[i].get()));
          drop(&running, i);
        }
        break;
      case 4:
        if (queued.empty() || below(3) > 0) break;
        const size_t i = below(static_cast<int>(queued.size()));
        EXPECT_TRUE(queue.Ended(queued[i].get()));
        drop(&queued, i);
        break;
    }
    ASSERT_EQ(queue.num_requests(), static_cast<int64_t>(queued.size()));
    std::map<std::string, int> at_workers;
    for (const auto& entry : running) ++at_workers[entry->tenant];
    for (const auto& entry : queued) at_workers[entry->tenant] += entry->is_running;
    for (const auto& [tenant, count] : at_workers) ASSERT_LE(count, 3) << tenant;
    const auto uses = queue.UseByTenant();
    int64_t total = 0;
    for (const auto& [tenant, count] : at_workers) total += count;
    ASSERT_EQ(uses[0].running, total);
  }
  for (auto* list : {&queued, &running}) {
    for (const auto& entry : *list) queue.Ended(entry.get());
  }
  EXPECT_EQ(queue.num_requests(), 0);
  EXPECT_EQ(queue.num_bytes(), 0);
  EXPECT_EQ(queue.UseByTenant()[0].running, 0);
}

}  // namespace
}  // namespace router

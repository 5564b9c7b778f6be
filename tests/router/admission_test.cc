#include "router/admission.h"

#include <map>
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
  return {.model = model, .priority = priority, .arrival = arrival, .bytes = bytes};
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

}  // namespace
}  // namespace router

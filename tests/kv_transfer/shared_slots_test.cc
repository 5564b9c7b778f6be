#include "kv_transfer/shared_slots.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/fakes/host_copies.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

constexpr uint16_t kSlots = 3;
constexpr int64_t kSlotBytes = 5000;

class SharedSlotsTest : public testing::Test {
 protected:
  absl::Status Open(const std::string& address) const {
    return PeerSlots::Open(copies_.get(), address).status();
  }
  // The address with another word in the place.
  std::string With(int place, const std::string& word) const {
    std::vector<std::string> words = absl::StrSplit(slots_->address(), ' ');
    words.at(place) = word;
    return absl::StrJoin(words, " ");
  }

  const std::unique_ptr<fakes::HostCopies> copies_ = fakes::CreateHostCopies();
  const std::unique_ptr<SharedSlots> slots_ =
      *SharedSlots::Create(copies_.get(), kSlots, kSlotBytes);
};

TEST_F(SharedSlotsTest, EachIsLentOnceAndAgainWhenItIsBack) {
  std::set<uint16_t> lent;
  for (int i = 0; i < kSlots; ++i) lent.insert(slots_->Take());
  EXPECT_EQ(lent, (std::set<uint16_t>{1, 2, 3}));
  EXPECT_EQ(slots_->Take(), 0);
  slots_->Return(2);
  EXPECT_EQ(slots_->Take(), 2);
}

TEST_F(SharedSlotsTest, WhatIsWrittenIsReadThroughTheAddress) {
  const auto peer = PeerSlots::Open(copies_.get(), slots_->address());
  ASSERT_TRUE(peer.ok()) << peer.status();
  for (uint16_t slot = 1; slot <= kSlots; ++slot) {
    std::fill_n(slots_->data(slot), kSlotBytes, static_cast<std::byte>(slot));
  }
  for (uint16_t slot = 1; slot <= kSlots; ++slot) {
    const auto bytes = (*peer)->Find(slot, kSlotBytes);
    ASSERT_EQ(bytes.size(), static_cast<size_t>(kSlotBytes));
    EXPECT_NE(bytes.data(), slots_->data(slot)) << "a mapping of its own";
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), static_cast<std::byte>(slot)), kSlotBytes);
  }
}

TEST_F(SharedSlotsTest, OutsideOfThemIsNothing) {
  const auto peer = *PeerSlots::Open(copies_.get(), slots_->address());
  EXPECT_TRUE(peer->Find(0, 1).empty());
  EXPECT_TRUE(peer->Find(kSlots + 1, 1).empty());
  EXPECT_TRUE(peer->Find(65535, 1).empty());
  EXPECT_TRUE(peer->Find(kSlots, 8193).empty());  // slots begin at pages
  EXPECT_TRUE(peer->Find(1, UINT64_MAX).empty());
}

TEST_F(SharedSlotsTest, TheyOutliveTheirOwner) {
  auto slots = *SharedSlots::Create(copies_.get(), 1, 1);
  const auto peer = *PeerSlots::Open(copies_.get(), slots->address());
  *slots->data(1) = std::byte{7};
  slots.reset();
  EXPECT_EQ(peer->Find(1, 1).front(), std::byte{7});
}

TEST_F(SharedSlotsTest, WhatIsNoAddressIsRefused) {
  for (const std::string& address :
       {std::string(), std::string("x"), slots_->address() + " 1", With(0, "0"), With(0, "-1"),
        With(1, "-1"), With(2, "0"), With(2, "70000"), With(3, "0"), With(3, "5000"),
        With(3, "1099511627776"), With(2, "x")}) {
    EXPECT_EQ(Open(address).code(), StatusCode::kInvalidArgument) << address;
  }
}

TEST_F(SharedSlotsTest, OtherMemoryThanWhatIsNamedIsRefused) {
  EXPECT_EQ(Open(slots_->address()).code(), StatusCode::kOk);
  EXPECT_EQ(Open(With(4, "ferry-slots-0")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(Open(With(1, "0")).code(), StatusCode::kUnavailable);       // the standard input
  EXPECT_EQ(Open(With(1, "999999")).code(), StatusCode::kUnavailable);  // nothing
  EXPECT_EQ(Open(With(0, "1")).code(), StatusCode::kUnavailable);       // another process
  EXPECT_EQ(Open(With(2, "4")).code(), StatusCode::kUnavailable);       // more than there are
  EXPECT_EQ(Open(With(3, "4096")).code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kv_transfer

#include "prefill_worker/peer_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

namespace prefill_worker {
namespace {

using kv_transfer::Epoch;
using testing::ElementsAre;

class PeerWorkTest : public testing::Test {
 protected:
  // Work that notes its name.
  PeerWork::Run Named(const std::string& name) {
    return [this, name] {
      Note(name);
      return true;
    };
  }
  void Note(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ran_.push_back(name);
  }
  std::vector<std::string> ran() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ran_;
  }
  // Returns when everything added for `peer` so far has run.
  void WaitFor(const Epoch& peer) {
    std::promise<void> reached;
    work_.Add(peer, [&reached] {
      reached.set_value();
      return true;
    });
    reached.get_future().wait();
  }

  const Epoch a_ = Epoch::Random();
  const Epoch b_ = Epoch::Random();
  std::mutex mutex_;  // guards ran_
  std::vector<std::string> ran_;
  PeerWork work_{/*num_threads=*/3};  // last: its threads use everything else
};

TEST_F(PeerWorkTest, OnePeersWorkWaitsForItsTurnAndOthersPassIt) {
  std::promise<void> open;
  work_.Add(a_, [this, opened = open.get_future().share()] {
    opened.wait();
    Note("a1");
    return true;
  });
  for (const char* name : {"a2", "a3", "a4"}) work_.Add(a_, Named(name));
  for (const char* name : {"b1", "b2", "b3", "b4"}) work_.Add(b_, Named(name));
  WaitFor(b_);
  EXPECT_THAT(ran(), ElementsAre("b1", "b2", "b3", "b4"));
  open.set_value();
  WaitFor(a_);
  EXPECT_THAT(ran(), ElementsAre("b1", "b2", "b3", "b4", "a1", "a2", "a3", "a4"));
}

TEST_F(PeerWorkTest, WhatIsNotDoneRunsAgainBeforeWhatCameLater) {
  std::promise<void> open;
  work_.Add(a_, [this, tries = 0, opened = open.get_future().share()]() mutable {
    opened.wait();
    Note("try");
    return ++tries == 3;
  });
  work_.Add(a_, Named("next"));
  open.set_value();
  WaitFor(a_);
  EXPECT_THAT(ran(), ElementsAre("try", "try", "try", "next"));
}

TEST_F(PeerWorkTest, CloseWaitsForWhatRunsAndStartsNothingMore) {
  std::promise<void> started, open;
  work_.Add(a_, [this, &started, opened = open.get_future().share()] {
    started.set_value();
    opened.wait();
    Note("a1");
    return true;
  });
  started.get_future().wait();
  std::thread closer([this] {
    work_.Close();
    Note("closed");
  });
  open.set_value();
  closer.join();
  work_.Add(b_, Named("b1"));
  EXPECT_THAT(ran(), ElementsAre("a1", "closed"));
}

}  // namespace
}  // namespace prefill_worker

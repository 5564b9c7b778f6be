// TransportContractTest: two ends of a transport in this process, over each kind of link by name.

#ifndef TESTS_KV_TRANSFER_CONTRACT_FIXTURE_H_
#define TESTS_KV_TRANSFER_CONTRACT_FIXTURE_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kv_transfer/loopback_transport.h"
#include "tests/kv_transfer/side.h"
#include "tests/kv_transfer/ucx_of_test.h"

namespace kv_transfer {

class TransportContractTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Side> MakeSide() {
    const Epoch epoch = Epoch::Random();
    if (LinkKindOf(GetParam()) == "loopback") {
      return std::make_unique<Side>(
          epoch, StageIfNamed(GetParam(), CreateLoopbackTransport(network_, epoch), copies_.get()));
    }
    auto transport = MakeUcx(GetParam(), epoch, copies_.get());
    if (!transport.ok()) {
      ADD_FAILURE() << transport.status();
      abort();
    }
    return std::make_unique<Side>(epoch, *std::move(transport));
  }
  static absl::Status Connect(Side& from, Side& to) {
    return from.transport->Connect(to.epoch, to.transport->addresses(), absl::Seconds(10));
  }
  void SetUp() override {
    a_ = MakeSide();
    b_ = MakeSide();
    ASSERT_TRUE(Connect(*a_, *b_).ok());
    ASSERT_TRUE(Connect(*b_, *a_).ok());
    if (absl::EndsWith(GetParam(), "_shared")) AwaitNotes();
  }
  // So that messages lie in shared slots from the first one on.
  void AwaitNotes() const {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    for (const Side* side : {a_.get(), b_.get()}) {
      while (side->transport->stats().messages_received == 0) {
        ASSERT_LT(absl::Now(), deadline);
        std::this_thread::yield();
      }
    }
  }
  // Expects a transfer from `from` at `to`.
  static TransferId Expect(Side& from, Side& to, Blocks& destination,
                           const Promised<IncomingResult>& ended,
                           absl::Duration stall = absl::Seconds(20)) {
    IncomingSpec spec = SpecFor(RandomId(), from.epoch, destination);
    const TransferId id = spec.transfer_id;
    spec.stall_timeout = stall;
    EXPECT_TRUE(to.incoming
                    ->Expect(std::move(spec),
                             [ended](IncomingResult result) { ended.Set(std::move(result)); })
                    .ok());
    return id;
  }

  const std::unique_ptr<kernels::DeviceCopies> copies_ = TestMemory::Get().MakeCopies();
  std::shared_ptr<LoopbackNetwork> network_ = CreateLoopbackNetwork();
  std::unique_ptr<Side> a_, b_;
};

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_CONTRACT_FIXTURE_H_

// StagedFixture: two staged transports in this process over a loopback network, each with copies
// that a test can hold up.

#ifndef TESTS_KV_TRANSFER_STAGED_FIXTURE_H_
#define TESTS_KV_TRANSFER_STAGED_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "kv_transfer/loopback_transport.h"
#include "kv_transfer/shared_slots.h"
#include "kv_transfer/staged_transport.h"
#include "tests/fakes/host_copies.h"
#include "tests/kv_transfer/side.h"

namespace kv_transfer {

class StagedFixture : public testing::Test {
 protected:
  static constexpr size_t kSlotBytes = 5000;
  static constexpr absl::Duration kMoment = absl::Milliseconds(20);  // of a fence that cannot stand

  // `num_shared`: slots of each side that the other one may read.
  explicit StagedFixture(uint16_t num_shared = 0) : num_shared_(num_shared) {
    a_ = MakeSide(a_copies_.get());
    b_ = MakeSide(b_copies_.get());
    ConnectBoth(*a_, *b_);
  }
  ~StagedFixture() override {
    for (fakes::HostCopies* copies : {a_copies_.get(), b_copies_.get()}) copies->Release();
  }

  std::unique_ptr<Side> MakeSide(kernels::DeviceCopies* copies) {
    const Epoch epoch = Epoch::Random();
    std::unique_ptr<SharedSlots> shared;
    if (num_shared_ > 0) shared = *SharedSlots::Create(copies, num_shared_, kSlotBytes);
    return std::make_unique<Side>(
        epoch, CreateStagedTransport(CreateLoopbackTransport(network_, epoch), copies, kSlotBytes,
                                     std::move(shared)));
  }
  static absl::Status Connect(Side& from, Side& to) {
    return from.transport->Connect(to.epoch, to.transport->addresses(), absl::Seconds(10));
  }
  static void ConnectBoth(Side& one, Side& other) {
    EXPECT_TRUE(Connect(one, other).ok());
    EXPECT_TRUE(Connect(other, one).ok());
    // What they tell each other comes on their threads, which a fence waits for.
    for (Side* side : {&one, &other}) {
      EXPECT_TRUE(side->transport->Fence(Epoch::Random(), absl::Seconds(10)).ok());
    }
  }
  // Expects `destination` at `to` and sends all of `source` there.
  static TransferId Start(Side& from, Side& to, Blocks& source, Blocks& destination,
                          const Promised<IncomingResult>& ended,
                          const Promised<OutgoingResult>& drained) {
    IncomingSpec spec = SpecFor(RandomId(), from.epoch, destination);
    const TransferId id = spec.transfer_id;
    EXPECT_TRUE(to.incoming
                    ->Expect(std::move(spec),
                             [ended](IncomingResult result) { ended.Set(std::move(result)); })
                    .ok());
    const auto outgoing = StartOutgoingTransfer(from.transport.get(), to.epoch, id, 1);
    for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
    outgoing->Finish([drained](OutgoingResult result) { drained.Set(std::move(result)); });
    return id;
  }
  // From a to b.
  TransferId Start(Blocks& source, Blocks& destination, const Promised<IncomingResult>& ended,
                   const Promised<OutgoingResult>& drained) {
    return Start(*a_, *b_, source, destination, ended, drained);
  }

  // It ends well on both sides, and what `source.Fill(pattern)` made is at `to`.
  static void ExpectArrival(Side& to, const TransferId& id, const Blocks& destination,
                            uint64_t pattern, Promised<IncomingResult>& ended,
                            Promised<OutgoingResult>& drained) {
    const OutgoingResult sent = drained.Wait().value();
    ASSERT_TRUE(sent.status.ok()) << sent.status;
    ASSERT_TRUE(to.incoming->Announce(id, sent.blocks, sent.bytes).ok());
    EXPECT_TRUE(ended.Wait().value().status.ok());
    EXPECT_TRUE(destination.HavePattern(pattern));
  }

  const uint16_t num_shared_;
  const std::unique_ptr<fakes::HostCopies> a_copies_ = fakes::CreateHostCopies();
  const std::unique_ptr<fakes::HostCopies> b_copies_ = fakes::CreateHostCopies();
  const std::shared_ptr<LoopbackNetwork> network_ = CreateLoopbackNetwork();
  std::unique_ptr<Side> a_, b_;
};

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_STAGED_FIXTURE_H_

// Side: one worker's end of a transfer in tests: a transport and its incoming transfers.

#ifndef TESTS_KV_TRANSFER_SIDE_H_
#define TESTS_KV_TRANSFER_SIDE_H_

#include <memory>
#include <utility>

#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/outgoing_transfer.h"
#include "kv_transfer/transport.h"
#include "tests/kv_transfer/blocks.h"
#include "tests/kv_transfer/observed_transport.h"
#include "tests/kv_transfer/promised.h"

namespace kv_transfer {

inline TransferId RandomId() { return Epoch::Random().bytes; }

// Closed in the right order by its destructor.
struct Side {
  Epoch epoch;
  std::unique_ptr<ObservedTransport> transport;
  std::unique_ptr<IncomingTransfers> incoming;

  Side(const Epoch& own, std::unique_ptr<Transport> t)
      : epoch(own),
        transport(std::make_unique<ObservedTransport>(std::move(t))),
        incoming(CreateIncomingTransfers(own, transport.get())) {}
  ~Side() { transport->Close(); }

  MessageHeader HeaderTo(const Side& receiver, const TransferId& id, uint32_t index,
                         uint64_t length) const {
    MessageHeader header;
    header.transfer_id = id;
    header.attempt = 1;
    header.receiver_epoch = receiver.epoch;
    header.index = index;
    header.length = length;
    return header;
  }
  // Sends one message and waits for its end.
  absl::Status SendAndWait(const Epoch& peer, const MessageHeader& header,
                           absl::Span<const std::byte> data) {
    Promised<absl::Status> done;
    transport->Send(peer, header, data,
                    [done](absl::Status status) { done.Set(std::move(status)); });
    return done.Wait().value_or(absl::DeadlineExceededError("the send did not end"));
  }
  // Sends all blocks as one transfer and waits until no send is in flight.
  OutgoingResult SendAll(const Epoch& peer, const TransferId& id, Blocks& source) {
    const auto outgoing = StartOutgoingTransfer(transport.get(), peer, id, /*attempt=*/1);
    for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
    Promised<OutgoingResult> drained;
    outgoing->Finish([drained](OutgoingResult result) { drained.Set(std::move(result)); });
    return drained.Wait().value_or(
        OutgoingResult{.status = absl::DeadlineExceededError("sends did not drain"),
                       .first_sent = absl::InfinitePast()});
  }
};

inline IncomingSpec SpecFor(const TransferId& id, const Epoch& sender, Blocks& destination) {
  IncomingSpec spec;
  spec.transfer_id = id;
  spec.attempt = 1;
  spec.sender = sender;
  spec.blocks = destination.spans();
  return spec;
}

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_SIDE_H_

// StagedSends: the sending half of a staged transport (staged_transport.h): what waits for a slot,
// what is being copied into one, and what the link or the receiver has not done with yet.
//
// Thread-safe.

#ifndef KV_TRANSFER_STAGED_SENDS_H_
#define KV_TRANSFER_STAGED_SENDS_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device_copies.h"
#include "kv_transfer/slot_peers.h"
#include "kv_transfer/staging_slots.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

class StagedSends final {
 public:
  using Done = std::function<void(absl::Status)>;

  // All must outlive it.
  StagedSends(Transport* inner, kernels::DeviceCopies* copies, StagingSlots* slots,
              SlotPeers* shared)
      : inner_(inner), copies_(copies), slots_(slots), shared_(shared) {}

  // `data` is the device's.
  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            Done done);

  // On the inner transport's progress thread: the receiver has done with a message in a slot.
  void OnAnswer(const Epoch& sender, const MessageHeader& answer);
  // And: what had not been sent, or answered, ends.
  void OnPeerLost(const Epoch& peer, const absl::Status& cause);

  // Further ones end at once.
  void Close();
  // Until none is under way.  REQUIRES: the inner transport is closed.
  void Wait();

 private:
  struct Message {
    MessageHeader header;
    absl::Span<const std::byte> data;
    Done done;
  };
  // What goes to a peer until its link is lost; a later link to it is another one.
  struct Link {
    explicit Link(const Epoch& to) : peer(to) {}
    const Epoch peer;
    std::deque<Message> queue;  // without a slot
    int32_t num_sending = 0;    // with one
    bool lost = false;
    absl::Status cause;
  };
  struct Sending {
    std::shared_ptr<Link> link;
    Message message;
    std::byte* slot = nullptr;           // null: there was no memory for one
    uint16_t shared = 0;                 // its number if the receiver reads it where it is
    bool sent = false;                   // then: the link has done with the message
    std::optional<absl::Status> answer;  // and the receiver, before the link

    bool AnsweredBy(const Epoch& sender, const MessageHeader& answer) const;
  };
  using SendingPtr = std::shared_ptr<Sending>;

  bool TakeSlot(const Link& link, Sending& one);
  void Pump();
  void OnStaged(const SendingPtr& one, absl::Status status);
  void OnSent(const SendingPtr& one, absl::Status status);
  void Finish(Sending& one, absl::Status status);

  Transport* const inner_;
  kernels::DeviceCopies* const copies_;
  StagingSlots* const slots_;
  SlotPeers* const shared_;

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::map<Epoch, std::shared_ptr<Link>> links_;  // with anything under way, not lost
  std::map<uint16_t, SendingPtr> unanswered_;     // by the slot that the receiver reads
  int32_t num_under_way_ = 0;  // messages with a slot; their callbacks use this object
  bool closed_ = false;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_STAGED_SENDS_H_

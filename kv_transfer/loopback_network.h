// What the loopback transports of a process share (loopback_transport.h): endpoints, links and
// messages under way, and the faults among them.
//
// Thread-safe.

#ifndef KV_TRANSFER_LOOPBACK_NETWORK_H_
#define KV_TRANSFER_LOOPBACK_NETWORK_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kv_transfer/loopback_transport.h"

namespace kv_transfer::loopback {

using Done = std::function<void(absl::Status)>;
using Pair = std::pair<Epoch, Epoch>;  // the smaller epoch first

// One process's end: its queue of things to do on its progress thread.
struct Endpoint {
  ReceiveSink* sink = nullptr;
  std::deque<std::function<void()>> todo;
  std::condition_variable wake;
  bool suspended = false;
  bool killed = false;
  bool stop = false;
  TransportStats stats;
};

// A message between Send and its last callback.
struct Message {
  enum class State {
    kQueued,   // waits for the sender's window
    kOnWire,   // the receiver has not been asked yet
    kHeld,     // accepted; its bytes wait for ReleaseDelayed
    kCopying,  // the receiver's thread is in a callback or copies; Cut waits for it
    kEnded,
  };
  Epoch from, to;
  std::shared_ptr<Endpoint> receiver;
  MessageHeader header;
  absl::Span<const std::byte> data;
  Done done;  // null once it is called, and for the second copy of a duplicate
  std::vector<std::byte> own_data;  // of that second copy: the sender's may be gone by then
  LoopbackFault fault = LoopbackFault::kNone;
  State state = State::kQueued;
  bool cut = false;  // the link went while the message was kCopying
  absl::Span<std::byte> destination;
};
using MessagePtr = std::shared_ptr<Message>;

class Network final : public LoopbackNetwork, public std::enable_shared_from_this<Network> {
 public:
  // LoopbackNetwork.

  void SetFaults(std::function<LoopbackFault(const MessageHeader&)> decide) override;
  void ReleaseDelayed() override;
  void Suspend(const Epoch& epoch) override;
  void Resume(const Epoch& epoch) override;
  void Kill(const Epoch& epoch) override;

  // For the transports.

  std::shared_ptr<Endpoint> Join(const Epoch& epoch);
  void Leave(const Epoch& epoch);
  // Waits until both sides have heard that the link before is gone.
  absl::Status Connect(const Epoch& self, const Epoch& peer, absl::Duration timeout);
  bool Connected(const Epoch& self, const Epoch& peer) const;
  void Send(const Epoch& from, const Epoch& to, const MessageHeader& header,
            absl::Span<const std::byte> data, Done done);
  void Cut(const Epoch& self, const Epoch& peer, const absl::Status& cause);
  TransportStats stats(const Endpoint& endpoint) const;
  void CountFence(Endpoint* endpoint);
  void SetSink(Endpoint* endpoint, ReceiveSink* sink);

  // Runs `call` on self's progress thread after everything queued there, and waits for it.
  bool WaitForThread(const Epoch& self, absl::Duration timeout);

  // The progress thread of one endpoint.
  void Run(const std::shared_ptr<Endpoint>& endpoint);

 private:
  using Decide = std::function<LoopbackFault(const MessageHeader&)>;

  // All below, unless they say so: mutex_ is held.

  Endpoint* Find(const Epoch& epoch);
  void Post(const Epoch& epoch, std::function<void()> call);
  void PostOffer(const MessagePtr& message);

  // Tells the sender, once, that its data is read no more.
  void AnswerSender(const MessagePtr& message, const absl::Status& status);
  void End(const MessagePtr& message, const absl::Status& status);
  void FillWindow(const Epoch& from, const Epoch& to);
  void PutOnWire(const MessagePtr& message);
  void ReleaseReordered();

  // On the receiver's progress thread, without the lock.
  void Offer(const MessagePtr& message);

  // Ends an accepted message; on the receiver's progress thread, without the lock.
  void Copy(const MessagePtr& message);

  // Ends the link.  Messages not offered end now, started receives end on their receiver's thread,
  // then both sides hear OnPeerLost.
  void Cut(std::unique_lock<std::mutex>&, const Epoch& a, const Epoch& b,
           const absl::Status& cause);

  mutable std::mutex mutex_;  // guards everything below and every Endpoint and Message
  std::condition_variable changed_;
  std::shared_ptr<Decide> decide_;
  std::map<Epoch, std::shared_ptr<Endpoint>> endpoints_;
  std::set<Pair> links_;
  std::multiset<Pair> untold_;      // links gone, once for each side that has not heard OnPeerLost
  std::list<MessagePtr> messages_;  // in the order of Send
  std::vector<MessagePtr> reordered_;
};

}  // namespace kv_transfer::loopback

#endif  // KV_TRANSFER_LOOPBACK_NETWORK_H_

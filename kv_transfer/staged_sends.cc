#include "kv_transfer/staged_sends.h"

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kv_transfer {
namespace {

absl::Status Lost(const Epoch& peer, const absl::Status& cause) {
  return absl::UnavailableError(
      absl::StrCat("link to ", peer.ToHex(), ": ", std::string(cause.message())));
}

}  // namespace

// An answer may be of an earlier link's message in the same slot.
bool StagedSends::Sending::AnsweredBy(const Epoch& sender, const MessageHeader& answer) const {
  const MessageHeader& sent = message.header;
  return link->peer == sender && sent.transfer_id == answer.transfer_id &&
         sent.attempt == answer.attempt && sent.index == answer.index && sent.part == answer.part;
}

void StagedSends::Send(const Epoch& peer, const MessageHeader& header,
                       absl::Span<const std::byte> data, Done done) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      std::shared_ptr<Link>& link = links_[peer];
      if (link == nullptr) link = std::make_shared<Link>(peer);
      link->queue.push_back({header, data, std::exchange(done, nullptr)});
    }
  }
  if (done) return done(absl::UnavailableError("the transport is closed"));
  Pump();
}

// A slot for the next message.  False: it has to wait for one.  mutex_ is held.
bool StagedSends::TakeSlot(const Link& link, Sending& one) {
  if (shared_->ReadsOurs(link.peer)) {
    one.shared = shared_->Take();
    if (one.shared != 0) {
      one.slot = shared_->data(one.shared);
      return true;
    }
    // Others have them all; even if they stand still, this link goes on.
    if (link.num_sending > 0) return false;
  }
  one.slot = slots_->Take();
  return true;
}

// Starts the copies that the windows allow.
void StagedSends::Pump() {
  std::vector<SendingPtr> ready;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [peer, link] : links_) {
      while (!link->queue.empty() && link->num_sending < kSendWindow) {
        auto one = std::make_shared<Sending>();
        if (!TakeSlot(*link, *one)) break;
        one->link = link;
        one->message = std::move(link->queue.front());
        link->queue.pop_front();
        ready.push_back(std::move(one));
        ++link->num_sending;
        ++num_under_way_;
      }
    }
  }
  for (const SendingPtr& one : ready) {
    if (one->slot == nullptr) {
      Finish(*one, absl::ResourceExhaustedError("no memory for copies of the device"));
      continue;
    }
    const absl::Span<const std::byte> data = one->message.data;
    copies_->ToHost({one->slot, data.size()}, data.data(),
                    [this, one](absl::Status status) { OnStaged(one, std::move(status)); });
  }
}

void StagedSends::OnStaged(const SendingPtr& one, absl::Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok() && one->link->lost) status = Lost(one->link->peer, one->link->cause);
    if (status.ok() && one->shared != 0) unanswered_[one->shared] = one;
  }
  if (!status.ok()) return Finish(*one, std::move(status));
  if (one->shared == 0) {
    return inner_->Send(one->link->peer, one->message.header, {one->slot, one->message.data.size()},
                        [this, one](absl::Status sent) { Finish(*one, std::move(sent)); });
  }
  MessageHeader header = one->message.header;
  header.slot = one->shared;
  inner_->Send(one->link->peer, header, {},
               [this, one](absl::Status sent) { OnSent(one, std::move(sent)); });
}

void StagedSends::OnSent(const SendingPtr& one, absl::Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = unanswered_.find(one->shared);
    if (it == unanswered_.end() || it->second != one) return;  // its link is lost
    one->sent = true;
    if (one->answer.has_value()) {
      status = *std::move(one->answer);
    } else if (status.ok()) {
      return;
    }
    unanswered_.erase(it);
  }
  Finish(*one, std::move(status));
}

void StagedSends::OnAnswer(const Epoch& sender, const MessageHeader& answer) {
  absl::Status status;
  if (answer.kind == MessageKind::kSlotRefused) {
    status = absl::AbortedError("refused by the receiver");
  }
  SendingPtr one;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = unanswered_.find(answer.slot);
    if (it == unanswered_.end() || !it->second->AnsweredBy(sender, answer)) return;
    if (!it->second->sent) {
      it->second->answer = std::move(status);
      return;
    }
    one = it->second;
    unanswered_.erase(it);
  }
  Finish(*one, std::move(status));
}

void StagedSends::Finish(Sending& one, absl::Status status) {
  if (one.shared != 0) {
    shared_->Return(one.shared);
  } else if (one.slot != nullptr) {
    slots_->Return(one.slot);
  }
  one.message.done(std::move(status));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --one.link->num_sending;
    if (!one.link->lost && one.link->queue.empty() && one.link->num_sending == 0) {
      links_.erase(one.link->peer);
    }
  }
  Pump();
  // The last thing that a callback does here: Wait may return from now on.
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_under_way_;
  changed_.notify_all();
}

void StagedSends::OnPeerLost(const Epoch& peer, const absl::Status& cause) {
  std::deque<Message> queue;
  std::vector<SendingPtr> unanswered;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = links_.find(peer);
    if (it == links_.end()) return;
    const std::shared_ptr<Link> link = std::move(it->second);
    links_.erase(it);
    link->lost = true;
    link->cause = absl::Status(cause.code(), cause.message());
    queue.swap(link->queue);
    for (auto one = unanswered_.begin(); one != unanswered_.end();) {
      const bool ends = one->second->link == link;
      if (ends) unanswered.push_back(std::move(one->second));
      one = ends ? unanswered_.erase(one) : std::next(one);
    }
  }
  for (const Message& one : queue) one.done(Lost(peer, cause));
  // The peer may go on reading their slots, whatever lies there then: nobody will confirm what it
  // has read.
  for (const SendingPtr& one : unanswered) Finish(*one, Lost(peer, cause));
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void StagedSends::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

void StagedSends::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return links_.empty() && num_under_way_ == 0; });
}

}  // namespace kv_transfer

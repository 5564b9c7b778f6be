#include "kv_transfer/outgoing_transfer.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "status/check.h"
#include "steady_time/steady_time.h"

namespace kv_transfer {
namespace {

class OutgoingTransferImpl final : public OutgoingTransfer,
                                   public std::enable_shared_from_this<OutgoingTransferImpl> {
 public:
  OutgoingTransferImpl(Transport* transport, const Epoch& receiver, const TransferId& id,
                       uint32_t attempt)
      : transport_(transport), receiver_(receiver), id_(id), attempt_(attempt) {}

  void SendBlock(uint32_t index, absl::Span<const std::byte> block) override {
    Queue(MessageKind::kBlock, index, block);
  }
  void SendStateSlot(absl::Span<const std::byte> slot) override {
    Queue(MessageKind::kStateSlot, 0, slot);
  }
  void SendHeartbeat() override { Queue(MessageKind::kHeartbeat, 0, {}); }
  void Finish(std::function<void(OutgoingResult)> on_drained) override {
    End(absl::OkStatus(), std::move(on_drained));
  }
  void Stop(absl::Status cause, std::function<void(OutgoingResult)> on_drained) override {
    FERRY_CHECK(!cause.ok()) << "a transfer is stopped for a reason";
    End(std::move(cause), std::move(on_drained));
  }
  int32_t num_in_flight() const override {
    std::lock_guard lock(mutex_);
    return num_handed_over_ + static_cast<int32_t>(queue_.size());
  }
  absl::Status status() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  struct Message {
    MessageHeader header;
    absl::Span<const std::byte> data;
    bool last_part;  // its completion completes the block
  };

  void Queue(MessageKind kind, uint32_t index, absl::Span<const std::byte> data) {
    {
      std::lock_guard lock(mutex_);
      if (finished_ && kind == MessageKind::kHeartbeat) return;  // crossed with the end
      FERRY_CHECK(!finished_) << "block " << index << " sent after Finish";
      if (!failure_.ok() || !stop_cause_.ok()) return;
      if (first_sent_ == absl::InfinitePast() && kind != MessageKind::kHeartbeat) {
        first_sent_ = steady_time::Now();
      }
      size_t offset = 0;
      uint32_t part = 0;
      do {
        const size_t length = std::min<size_t>(data.size() - offset, kMaxMessageBytes);
        Message message;
        message.header.transfer_id = id_;
        message.header.attempt = attempt_;
        message.header.kind = kind;
        message.header.receiver_epoch = receiver_;
        message.header.index = index;
        message.header.part = part++;
        message.header.length = length;
        message.data = data.subspan(offset, length);
        offset += length;
        message.last_part = offset == data.size();
        queue_.push_back(message);
      } while (offset < data.size());
    }
    HandOver();
  }

  // Gives the transport what the window allows.  The rest waits here, where Stop can still drop it.
  void HandOver() {
    while (true) {
      Message message;
      {
        std::lock_guard lock(mutex_);
        if (queue_.empty() || num_handed_over_ >= kSendWindow) return;
        message = queue_.front();
        queue_.pop_front();
        ++num_handed_over_;
      }
      transport_->Send(receiver_, message.header, message.data,
                       [self = shared_from_this(), message](absl::Status status) {
                         self->OnSent(message, std::move(status));
                       });
    }
  }

  void OnSent(const Message& message, absl::Status status) {
    std::vector<std::function<void(OutgoingResult)>> on_drained;
    OutgoingResult result;
    {
      std::lock_guard lock(mutex_);
      --num_handed_over_;
      if (status.ok()) {
        bytes_ += message.header.length;
        if (message.last_part && message.header.kind == MessageKind::kBlock) ++blocks_;
      } else if (failure_.ok()) {
        failure_ = std::move(status);
      }
      if (!failure_.ok()) queue_.clear();
      if (num_handed_over_ == 0 && queue_.empty()) {
        on_drained = std::exchange(on_drained_, {});
        result = Result();
      }
    }
    for (const auto& call : on_drained) call(result);
    HandOver();
  }

  void End(absl::Status cause, std::function<void(OutgoingResult)> on_drained) {
    OutgoingResult result;
    {
      std::lock_guard lock(mutex_);
      if (cause.ok()) {
        finished_ = true;
      } else {
        stop_cause_ = std::move(cause);
        queue_.clear();
      }
      if (num_handed_over_ > 0 || !queue_.empty()) {
        on_drained_.push_back(std::move(on_drained));
        return;
      }
      result = Result();
    }
    on_drained(std::move(result));
  }

  OutgoingResult Result() const {  // mutex_ is held
    // Not shared with who asked: absl counts a status's owners where ThreadSanitizer cannot see.
    const absl::Status& status = stop_cause_.ok() ? failure_ : stop_cause_;
    return {.status = absl::Status(status.code(), status.message()),
            .bytes = bytes_,
            .blocks = blocks_,
            .first_sent = first_sent_};
  }

  Transport* const transport_;
  const Epoch receiver_;
  const TransferId id_;
  const uint32_t attempt_;

  mutable std::mutex mutex_;  // guards everything below
  std::deque<Message> queue_;
  int32_t num_handed_over_ = 0;
  uint64_t bytes_ = 0;
  int32_t blocks_ = 0;
  absl::Time first_sent_ = absl::InfinitePast();
  absl::Status failure_;
  bool finished_ = false;
  absl::Status stop_cause_;
  std::vector<std::function<void(OutgoingResult)>> on_drained_;
};

}  // namespace

std::shared_ptr<OutgoingTransfer> StartOutgoingTransfer(Transport* transport, const Epoch& receiver,
                                                        const TransferId& id, uint32_t attempt) {
  return std::make_shared<OutgoingTransferImpl>(transport, receiver, id, attempt);
}

}  // namespace kv_transfer

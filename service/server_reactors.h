// Server-side ends of RPCs that other threads finish: OutboundStream for server-streaming calls and
// DeferredReply for unary ones.  Both may be written to from any thread and never block it; both
// stay usable (and do nothing) after the call has ended, so that a scheduler can hold them without
// knowing.
//
// Whoever makes one must end it exactly once with End / Reply, also after it was broken.
// Thread-safe.  Include this in .cc files only: it drags gRPC in.

#ifndef SERVICE_SERVER_REACTORS_H_
#define SERVICE_SERVER_REACTORS_H_

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "grpcpp/support/server_callback.h"
#include "grpcpp/support/status.h"

namespace service {

template <typename Message>
class OutboundStream final : public grpc::ServerWriteReactor<Message> {
 public:
  // Shared: gRPC keeps one owner until the call is done, the caller another.  `on_broken` is called
  // at most once, when the client has cancelled or gone before End; it must not block.
  static std::shared_ptr<OutboundStream> Create(std::function<void()> on_broken) {
    auto stream = std::shared_ptr<OutboundStream>(new OutboundStream(std::move(on_broken)));
    stream->self_ = stream;
    return stream;
  }

  // Queues a message; false if the stream is broken or ended.
  bool Push(Message message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_ || end_.has_value()) return false;
    queue_.push_back(std::move(message));
    WriteNext();
    return true;
  }

  // Ends the call after everything queued has been written.  Later calls are ignored.
  void End(grpc::Status status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_.has_value()) return;
    end_ = std::move(status);
    WriteNext();
  }

  bool broken() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return broken_;
  }

 private:
  explicit OutboundStream(std::function<void()> on_broken) : on_broken_(std::move(on_broken)) {}

  // REQUIRES: mutex_ is held.
  void WriteNext() {
    if (writing_) return;
    if (!queue_.empty() && !broken_) {
      writing_ = true;
      current_ = std::move(queue_.front());
      queue_.pop_front();
      this->StartWrite(&current_);
    } else if (end_.has_value() && !finished_) {
      finished_ = true;
      this->Finish(*end_);
    }
  }

  void Break(bool write_ended) {
    std::function<void()> notify;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (write_ended) writing_ = false;
      if (!broken_ && !end_.has_value()) notify = std::move(on_broken_);
      broken_ = true;
      queue_.clear();
      WriteNext();
    }
    if (notify) notify();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return Break(/*write_ended=*/true);
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    WriteNext();
  }
  void OnCancel() override { Break(/*write_ended=*/false); }
  void OnDone() override {
    std::shared_ptr<OutboundStream> self;  // outlives the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
    self = std::move(self_);
  }

  mutable std::mutex mutex_;  // guards everything below
  std::function<void()> on_broken_;
  std::deque<Message> queue_;
  Message current_;
  bool writing_ = false;
  bool broken_ = false;
  bool finished_ = false;
  std::optional<grpc::Status> end_;
  std::shared_ptr<OutboundStream> self_;  // until OnDone
};

class DeferredReply final : public grpc::ServerUnaryReactor {
 public:
  // `on_cancel` is called at most once, when the caller has cancelled or gone before Reply; it must
  // not block.
  static std::shared_ptr<DeferredReply> Create(std::function<void()> on_cancel) {
    auto reply = std::shared_ptr<DeferredReply>(new DeferredReply(std::move(on_cancel)));
    reply->self_ = reply;
    return reply;
  }

  // Ends the call: `fill` writes the response, if the call is still there.  Later calls are
  // ignored.
  void Reply(const grpc::Status& status, const std::function<void()>& fill = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (replied_) return;
    replied_ = true;
    if (fill) fill();
    this->Finish(status);
  }

  bool cancelled() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cancelled_;
  }

 private:
  explicit DeferredReply(std::function<void()> on_cancel) : on_cancel_(std::move(on_cancel)) {}

  void OnCancel() override {
    std::function<void()> notify;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      cancelled_ = true;
      if (!replied_) notify = std::move(on_cancel_);
    }
    if (notify) notify();
  }
  void OnDone() override {
    std::shared_ptr<DeferredReply> self;  // outlives the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    self = std::move(self_);
  }

  mutable std::mutex mutex_;  // guards everything below
  std::function<void()> on_cancel_;
  bool replied_ = false;
  bool cancelled_ = false;
  std::shared_ptr<DeferredReply> self_;  // until OnDone
};

}  // namespace service

#endif  // SERVICE_SERVER_REACTORS_H_

// DecodeLeg and PrefillLeg: a request's half at one worker, in one try: the stream, what has been
// heard on it, and how it is closed.  A leg that is closed says nothing more and makes sure that
// the worker knows.
//
// Owned by the loop's thread.  An owner may close a leg inside a callback, but must not destroy it
// there.

#ifndef ROUTER_WORKER_LEGS_H_
#define ROUTER_WORKER_LEGS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/event_loop.h"
#include "router/worker_client.h"

namespace ferry::v1 {
class DecodeDone;
class DecodeTokens;
class PrefillDone;
}  // namespace ferry::v1

namespace router {

class DecodeLeg final {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnDecodeAccepted() = 0;
    virtual void OnDecodeTokens(const ferry::v1::DecodeTokens& tokens) = 0;
    virtual void OnDecodeDone(const ferry::v1::DecodeDone& done) = 0;
    // The stream ended without Done.
    virtual void OnDecodeFailed(const absl::Status& status) = 0;
  };

  DecodeLeg(std::shared_ptr<WorkerClient> client, std::string traceparent, Owner* owner);
  ~DecodeLeg();

  void Open(const ferry::v1::DecodeRequest& request);
  // After OnDecodeTokens: the next event is wanted.
  void ReadNext();
  // Cancels, unless the worker is done.
  void Close(const std::string& reason);

 private:
  void OnEvent(const ferry::v1::DecodeEvent& event);
  void OnEnd(const absl::Status& status);

  const std::shared_ptr<WorkerClient> client_;  // shared with the link, which may reconnect
  const std::string traceparent_;
  Owner* const owner_;
  std::unique_ptr<ferry::v1::RequestKey> key_;
  std::unique_ptr<RpcStream> stream_;
  bool done_ = false;
  bool closed_ = false;
};

class PrefillLeg final {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnPrefillAccepted() = 0;
    virtual void OnPrefillStarted() = 0;
    // The prompt is computed and its blocks wait at the worker; the leg renews their lease.
    virtual void OnPrefillHeld(const std::string& cause) = 0;
    // The decode worker has every byte.
    virtual void OnPrefillDone(const ferry::v1::PrefillDone& done) = 0;
    // The stream ended without Done, or the lease is lost.
    virtual void OnPrefillFailed(const absl::Status& status) = 0;
    // The blocks did not reach the decode worker named in PushHeld.  They are still held, unless
    // the code is kNotFound.
    virtual void OnPushHeldFailed(const absl::Status& status) = 0;
  };

  PrefillLeg(std::shared_ptr<WorkerClient> client, std::string traceparent, EventLoop* loop,
             Owner* owner);
  ~PrefillLeg();

  void Open(const ferry::v1::PrefillRequest& request);
  // REQUIRES: OnPrefillHeld was called.
  void PushHeld(const ferry::v1::PushHeldRequest& request, absl::Duration timeout);
  // Forgets a PushHeld whose decode worker has failed; the blocks stay held.
  void DropPush();
  void Close(const std::string& reason);
  const ferry::v1::RequestKey& key() const { return *key_; }

 private:
  void OnEvent(const ferry::v1::PrefillEvent& event);
  void OnEnd(const absl::Status& status);
  void OnDone(const ferry::v1::PrefillDone& done);
  void RenewAfter(absl::Duration lease);
  void Renew();

  const std::shared_ptr<WorkerClient> client_;  // shared with the link, which may reconnect
  const std::string traceparent_;
  EventLoop* const loop_;
  Owner* const owner_;
  std::unique_ptr<ferry::v1::RequestKey> key_;
  std::string worker_epoch_;
  std::unique_ptr<RpcStream> stream_;
  std::unique_ptr<RpcCall> push_call_;
  std::unique_ptr<RpcCall> renew_call_;
  EventLoop::TimerId renew_timer_ = 0;
  bool held_ = false;
  bool done_ = false;         // nothing is left to wait for or to cancel
  bool stream_done_ = false;  // Done came on the stream, not as PushHeld's answer
  bool closed_ = false;
};

}  // namespace router

#endif  // ROUTER_WORKER_LEGS_H_

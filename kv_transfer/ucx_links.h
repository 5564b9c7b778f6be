// UcxLinks: all links of a UCX transport: making them, finding whose message came, closing them.
//
// Used by the transport's progress thread only.  Callbacks of UCX note what happened; Advance acts
// on it outside of them.
//
// A link closes in this order: nothing new is started, its endpoints are closed by force, and the
// thread goes on progressing until every started receive and send has completed.  Only then is
// OnPeerLost called and a fence answered: bytes were seen to land after the close itself.

#ifndef KV_TRANSFER_UCX_LINKS_H_
#define KV_TRANSFER_UCX_LINKS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "kv_transfer/link_hello.h"
#include "kv_transfer/transport.h"
#include "kv_transfer/ucx_link.h"
#include "kv_transfer/ucx_worker.h"

namespace kv_transfer {

class UcxLinks {
 public:
  using Answer = std::function<void(absl::Status)>;

  // `counters` and `device_memory` must outlive it.
  UcxLinks(const Epoch& own_epoch, UcxCounters* counters, DeviceMemory* device_memory)
      : own_epoch_(own_epoch), counters_(counters), device_memory_(device_memory) {}
  ~UcxLinks();  // REQUIRES: empty()

  // Handlers for a worker of these links.
  UcxWorker::Handlers handlers();

  void SetSink(ReceiveSink* sink) { sink_ = sink; }

  // Answers OK when the process with epoch `peer` has answered over a new endpoint (or at once if
  // it is connected), kUnavailable when that fails.  A process that never answers: see
  // CancelConnect.
  void Connect(const Epoch& peer, UcxWorker* worker, const LinkAddress& address, Answer answer) {
    Make({peer, worker, address, std::move(answer)});
  }
  // Gives up a connection that is still being made; its Connect is answered.
  void CancelConnect(const Epoch& peer);

  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            std::function<void(absl::Status)> done);

  // Closes the link and answers when it has drained; at once if there is none.
  void Fence(const Epoch& peer, const absl::Status& cause, std::function<void()> answer);
  void CloseAll();

  // Closes all that runs over `worker`; true when nothing of it is left and it can be renewed.
  // Meanwhile Connects over it wait.
  bool Leave(UcxWorker* worker);
  // Goes on with the Connects that waited for `worker`; `status` is what its renewal has given.
  void Resume(UcxWorker* worker, const absl::Status& status);

  // Acts on what the callbacks noted.  True if there was anything.
  bool Advance();

  bool empty() const { return links_.empty() && endpoints_.empty() && closing_.empty(); }
  bool closing() const { return num_closing_links_ > 0 || !closing_.empty(); }
  // Some message is on its way, in or out.
  bool moving() const;
  std::string LinkName(const Epoch& peer) const;

 private:
  struct Hello {
    std::weak_ptr<UcxEndpoint> endpoint;  // the one it came over; may be closed by now
    LinkHello hello;
  };
  struct Attempt {  // a Connect
    Epoch peer;
    UcxWorker* worker;
    LinkAddress address;
    Answer answer;
  };
  struct Waiting {  // for what happens to one link
    std::vector<Attempt> connected;
    std::vector<std::function<void()>> fenced;
    std::vector<Hello> hellos;       // of the peer's next link
    std::vector<Attempt> reconnect;  // to make when this link is gone
  };
  struct Entry {
    std::unique_ptr<UcxLink> link;
    Waiting waiting;
  };

  static ucs_status_t OnHelloMessage(void* arg, const void* header, size_t header_length,
                                     void* data, size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t OnMessage(void* arg, const void* header, size_t header_length, void* data,
                                size_t length, const ucp_am_recv_param_t* param);
  static void OnConnection(ucp_conn_request_h request, void* arg);
  static void OnError(void* arg, ucp_ep_h handle, ucs_status_t status);

  using EndpointPtr = std::shared_ptr<UcxEndpoint>;

  void Make(Attempt attempt);
  EndpointPtr NewEndpoint(UcxWorker* worker);
  EndpointPtr Open(EndpointPtr endpoint, ucp_ep_h handle);
  EndpointPtr FindOrExpose(UcxWorker* worker, ucp_ep_h reply, absl::Span<const std::byte> address);
  UcxLink* StartLink(const Epoch& peer);
  void SendHello(const EndpointPtr& endpoint, LinkHello::Kind kind, const Epoch& to,
                 uint64_t session, uint64_t peer_session);
  void HandleHello(const Hello& one);
  void HandleAccepted(const EndpointPtr& endpoint, const LinkHello& answer);
  void HandleRefusal(const EndpointPtr& endpoint, const LinkHello& answer);
  void Bind(Entry& entry, const EndpointPtr& endpoint, const LinkHello& hello);
  void AnswerConnects(Entry& entry, absl::StatusCode code, const std::string& message);
  void CloseLink(Entry& entry, const absl::Status& cause);
  void CloseEndpoint(const EndpointPtr& endpoint);
  void HandleErrors();
  bool FinishClosed();

  const Epoch own_epoch_;
  UcxCounters* const counters_;
  DeviceMemory* const device_memory_;
  ReceiveSink* sink_ = nullptr;
  uint64_t last_session_ = 0;
  int32_t num_closing_links_ = 0;
  std::map<Epoch, Entry> links_;
  absl::flat_hash_map<ucp_ep_h, EndpointPtr> endpoints_;  // open ones
  std::vector<EndpointPtr> closing_;
  std::vector<Hello> hellos_;             // noted by callbacks
  std::vector<EndpointPtr> superfluous_;  // opened beside the one that was meant
  std::vector<Attempt> postponed_;        // until their worker is renewed
  bool shut_ = false;                     // CloseAll was called: nobody is let in any more
  bool error_noted_ = false;              // some endpoint has failed
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_UCX_LINKS_H_

// UcxLink: one connection to one remote epoch: its queue and window of sends, its started receives
// and how they drain when it closes.
//
// Used by the transport's progress thread only.  Once closing it starts nothing more; its owner
// (ucx_links.h) deletes it when it has drained.

#ifndef KV_TRANSFER_UCX_LINK_H_
#define KV_TRANSFER_UCX_LINK_H_

#include <ucp/api/ucp.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kv_transfer/device_memory.h"
#include "kv_transfer/message_header.h"
#include "kv_transfer/transport.h"
#include "kv_transfer/ucx_worker.h"

namespace kv_transfer {

// TransportStats while the progress thread counts and others read.
struct UcxCounters {
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, messages_sent{0}, messages_received{0},
      messages_refused{0}, messages_failed{0}, fences{0};
};

class UcxLink;

// An endpoint and whose it is.  UCX keeps a pointer to it for the error callback, so ucx_links.h
// keeps it until the endpoint's close has completed; its link holds it too.
struct UcxEndpoint {
  ucp_ep_h handle = nullptr;
  UcxWorker* worker = nullptr;
  UcxLink* link = nullptr;  // null until a hello says whose it is
  bool confirmed = false;   // the process at its other end has told its epoch
  bool failed = false;      // UCX reported an error
  bool closed = false;      // its close has begun
  ucs_status_t error = UCS_OK;
  void* close_request = nullptr;
};

class UcxLink {
 public:
  enum class State { kConnecting, kUp, kClosing };

  // `counters` and `device_memory` must outlive it.  While it is up it says in `device_memory`
  // whether it takes a device's.
  UcxLink(const Epoch& peer, uint64_t session, UcxCounters* counters, DeviceMemory* device_memory)
      : peer_(peer), session_(session), counters_(counters), device_memory_(device_memory) {}
  ~UcxLink();  // REQUIRES: drained()

  const Epoch& peer() const { return peer_; }
  uint64_t session() const { return session_; }
  State state() const { return state_; }
  bool was_up() const { return was_up_; }
  const absl::Status& cause() const { return cause_; }  // of its closing
  const std::vector<std::shared_ptr<UcxEndpoint>>& endpoints() const { return endpoints_; }

  uint64_t peer_session = 0;  // 0: not known yet

  void Add(std::shared_ptr<UcxEndpoint> endpoint);
  // The first confirmed endpoint makes a link that is not closing ready to send.
  void Confirm(UcxEndpoint* endpoint);

  void Send(const MessageHeader& header, absl::Span<const std::byte> data,
            std::function<void(absl::Status)> done);

  // Asks `sink` about a message and starts its receive.  Returns what the UCX callback must return.
  // `data` and `param` are the callback's.
  ucs_status_t Offer(ReceiveSink* sink, UcxWorker* worker, const MessageHeader& header, void* data,
                     const ucp_am_recv_param_t* param);

  // Refuses everything from now on; queued sends end.  The owner closes the endpoints.
  void StartClosing(absl::Status cause);

  // No receive may write and no send may read any more.  The endpoints' closes are not part of it.
  bool drained() const { return sends_in_flight_ == 0 && receives_in_flight_ == 0; }

 private:
  struct SendRequest {
    UcxLink* link;
    WireHeader header;  // UCX reads it until the send completes
    uint64_t length;    // that it says
    absl::Span<const std::byte> data;
    std::function<void(absl::Status)> done;
  };
  struct ReceiveRequest {
    UcxLink* link;
    ReceiveSink* sink;
    MessageHeader header;
  };
  static void OnSent(void* request, ucs_status_t status, void* user_data);
  static void OnReceived(void* request, ucs_status_t status, size_t length, void* user_data);
  void FinishSend(std::unique_ptr<SendRequest> request, ucs_status_t status);
  void FinishReceive(std::unique_ptr<ReceiveRequest> request, ucs_status_t status);
  void FillWindow();
  // Says in `param` whose memory it is.  False: a device's, which this link does not take.
  bool SetMemoryType(const std::byte* data, ucp_request_param_t& param) const;

  const Epoch peer_;
  const uint64_t session_;
  UcxCounters* const counters_;
  DeviceMemory* const device_memory_;
  State state_ = State::kConnecting;
  bool was_up_ = false;
  absl::Status cause_;
  std::vector<std::shared_ptr<UcxEndpoint>> endpoints_;
  UcxEndpoint* send_endpoint_ = nullptr;
  std::deque<std::unique_ptr<SendRequest>> queue_;
  int32_t sends_in_flight_ = 0;
  int32_t receives_in_flight_ = 0;
  bool filling_ = false;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_UCX_LINK_H_

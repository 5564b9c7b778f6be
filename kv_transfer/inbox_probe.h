// InboxProbe: notices that the queue in which a shared-memory worker receives is blocked.
//
// Over shared memory all peers of a UCX worker write into one queue: each takes the next place,
// then fills it.  A peer that is killed or stopped between the two leaves a place that is never
// filled, the receiver waits there for ever, and nothing behind it is seen, whoever sent it.  UCX
// notices none of this.  So the worker sends itself a message through its queue every quarter of a
// second. One that has not come back after a second means that the queue is blocked, and everything
// has to move to a new one (UcxWorker::Renew).  A peer that lives is never in between for so long.
//
// Used by the transport's progress thread only.

#ifndef KV_TRANSFER_INBOX_PROBE_H_
#define KV_TRANSFER_INBOX_PROBE_H_

#include <ucp/api/ucp.h>

#include <chrono>

namespace kv_transfer {

class InboxProbe {
 public:
  using Clock = std::chrono::steady_clock;

  InboxProbe() = default;
  ~InboxProbe() { Close(); }
  InboxProbe(const InboxProbe&) = delete;
  InboxProbe& operator=(const InboxProbe&) = delete;

  // Probes `worker`, whose address is `own_address`, with active messages of this id.
  ucs_status_t Open(ucp_worker_h worker, const ucp_address_t* own_address, unsigned am_id);
  // REQUIRES: called before the worker is destroyed.
  void Close();

  // To be called after each progress of the worker; `idle`: that progress found nothing to do.
  // True from when the queue is known to be blocked until Close.
  bool Blocked(Clock::time_point now, bool idle);

 private:
  static ucs_status_t OnProbe(void* arg, const void* header, size_t header_length, void* data,
                              size_t length, const ucp_am_recv_param_t* param);
  void Send();

  ucp_ep_h to_self_ = nullptr;
  unsigned am_id_ = 0;
  Clock::time_point sent_;
  bool in_flight_ = false;
  bool blocked_ = false;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_INBOX_PROBE_H_

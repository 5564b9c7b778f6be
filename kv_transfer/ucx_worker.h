// UcxWorker: one UCX context and worker for one kind of link, with the settings that Ferry needs.
//
//   shm  shared memory and cross-memory copies between processes of one host
//   tcp  sockets; others connect through a listener
//   rc   RDMA reliable connections, where devices exist; otherwise as tcp
//
// Not thread-safe: after creation only the transport's progress thread uses it.

#ifndef KV_TRANSFER_UCX_WORKER_H_
#define KV_TRANSFER_UCX_WORKER_H_

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kv_transfer/inbox_probe.h"
#include "kv_transfer/transport.h"
#include "kv_transfer/ucx_transport.h"

namespace kv_transfer {

// Ids of UCX active messages.
inline constexpr unsigned kHelloAm = 1;    // link_hello.h, then the speaker's worker address
inline constexpr unsigned kMessageAm = 2;  // message_header.h, then the data
inline constexpr unsigned kProbeAm = 3;    // inbox_probe.h; empty

class UcxWorker {
 public:
  struct Handlers {  // each is called with the UcxWorker as its argument
    ucp_am_recv_callback_t on_hello;
    ucp_am_recv_callback_t on_message;
    ucp_listener_conn_callback_t on_connection;
    void* user_data;  // what user_data() returns
  };

  // Errors: kUnavailable naming the link kind and what UCX said; kInvalidArgument for an unknown
  // kind or a bad listen address.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const std::string& kind,
                                                           const UcxOptions& options,
                                                           const Handlers& handlers);
  ~UcxWorker();  // REQUIRES: no endpoint is left
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  void* user_data() const { return handlers_.user_data; }
  const std::string& kind() const { return kind_; }        // from any thread
  const std::string& host_id() const { return host_id_; }  // from any thread
  const LinkAddress& address() const { return address_; }

  // Null after a Renew that failed; then Progress does nothing and no endpoint can be created.
  ucp_worker_h handle() const { return worker_; }
  int event_fd() const { return event_fd_; }

  // One call of UCX's progress.  True if there was anything to do.
  bool Progress(InboxProbe::Clock::time_point now);

  // Nothing arrives here any more (inbox_probe.h): close all endpoints, then Renew.
  bool blocked() const { return blocked_; }
  // Begins again with a context and worker of its own, at another address.
  // REQUIRES: no endpoint is left.  Errors: as of Create; blocked() stays true, try again later.
  absl::Status Renew();

  // Registers memory where the link profits from it (RDMA).
  absl::Status Register(absl::Span<std::byte> region);

  // An endpoint with peer error handling: `on_error(on_error_arg, ...)` is called once if it
  // breaks. Errors: kUnavailable.
  absl::StatusOr<ucp_ep_h> ConnectTo(const LinkAddress& peer, ucp_err_handler_cb_t on_error,
                                     void* on_error_arg);
  absl::StatusOr<ucp_ep_h> ConnectToWorker(const std::string& worker_address,
                                           ucp_err_handler_cb_t on_error, void* on_error_arg);
  absl::StatusOr<ucp_ep_h> Accept(ucp_conn_request_h request, ucp_err_handler_cb_t on_error,
                                  void* on_error_arg);

  // Whether what goes over the endpoint may lie in a device's memory: the receiver's device reads
  // the sender's then.
  bool TakesDeviceMemory(ucp_ep_h endpoint) const;

  // "shm/sysv+cma", "tcp/lo": what the endpoint uses.
  std::string LinkName(ucp_ep_h endpoint) const;

 private:
  UcxWorker(const std::string& kind, const UcxOptions& options, const Handlers& handlers);
  absl::Status Init();
  absl::Status Listen();
  absl::Status SetHandlers();
  void Destroy();
  absl::StatusOr<ucp_ep_h> CreateEndpoint(ucp_ep_params_t params, ucp_err_handler_cb_t on_error,
                                          void* on_error_arg);

  const std::string kind_;
  const std::string host_id_;
  const UcxOptions options_;
  const Handlers handlers_;
  const bool knows_device_memory_;
  LinkAddress address_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int event_fd_ = -1;
  std::vector<ucp_mem_h> registered_;
  InboxProbe probe_;  // of shared memory
  bool blocked_ = false;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_UCX_WORKER_H_

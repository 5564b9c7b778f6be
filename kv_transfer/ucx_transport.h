// UcxTransport: Transport over UCX active messages with rendezvous (DESIGN.md section 5).
//
// One UCX context per link kind ("shm" and "tcp"; "rc" where devices exist), one worker each,
// one progress thread for all: it looks for work for 50 us, or 1 ms while a message is on its way,
// and then sleeps on UCX's event descriptors.

#ifndef KV_TRANSFER_UCX_TRANSPORT_H_
#define KV_TRANSFER_UCX_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

struct UcxOptions {
  Epoch epoch;  // ours
  std::vector<std::string> link_kinds = {"shm",
                                         "tcp"};  // best first; "rc" where RDMA devices exist
  std::string listen_ip = "0.0.0.0";              // of the TCP listener
  int32_t listen_port = 0;                        // the next kind's is one more; 0: any
  std::string net_devices = "all";                // UCX_NET_DEVICES
  // Links within a host take the memory of CUDA devices.  REQUIRES: UcxKnowsDeviceMemory().
  bool device_memory = false;
  // Called on every thread that UCX is used on: makes the device the thread's.  May be null.
  std::function<void()> enter_thread = {};
};

// Whether the UCX at hand knows the memory of CUDA devices (Debian's does not).  Takes some
// milliseconds.
bool UcxKnowsDeviceMemory();
std::string UcxVersion();  // "1.13.1"

// Errors: kUnavailable naming the link kind and what UCX said.
absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(const UcxOptions& options);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_UCX_TRANSPORT_H_

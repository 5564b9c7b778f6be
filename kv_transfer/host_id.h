// HostId: equal for two processes exactly when they may use shared memory with one another.

#ifndef KV_TRANSFER_HOST_ID_H_
#define KV_TRANSFER_HOST_ID_H_

#include <string>

namespace kv_transfer {

// Made of the kernel's boot id and what shared memory and cross-memory copies depend on: the IPC,
// PID and user namespaces and the user id.  Namespaces of one machine (containers) are hosts of
// their own. Unknown parts are replaced by random ones: then nobody is on the same host, and TCP is
// used.
std::string HostId();

}  // namespace kv_transfer

#endif  // KV_TRANSFER_HOST_ID_H_

// How UCX is set up for one kind of link.
//
// Thread-safe.

#ifndef KV_TRANSFER_UCX_CONFIG_H_
#define KV_TRANSFER_UCX_CONFIG_H_

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kv_transfer/ucx_transport.h"

namespace kv_transfer {

// "ucx shm: creating a worker: ...".
absl::Status UcxError(const std::string& kind, const std::string& what, ucs_status_t status);

using UcxConfig = std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)>;

// `device_memory`: links within a host move a device's memory too.
// Errors: kUnavailable naming the setting, kInvalidArgument for an unknown kind.
absl::StatusOr<UcxConfig> UcxConfigFor(const std::string& kind, const UcxOptions& options,
                                       bool device_memory);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_UCX_CONFIG_H_

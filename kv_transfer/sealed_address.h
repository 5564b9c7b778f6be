// SealedAddress: UCX's worker address with a digest in front.
//
// UCX reads an address without knowing its length and ends the process, or worse, on bytes that are
// none.  Addresses come in messages, so nothing is given to UCX before it is what some worker
// wrote. The digest finds damage and foreign bytes; it is no signature.
//
// Thread-safe: pure functions.

#ifndef KV_TRANSFER_SEALED_ADDRESS_H_
#define KV_TRANSFER_SEALED_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"

namespace kv_transfer {

std::string SealAddress(const std::string& address);
// The address that was sealed.  Errors: kInvalidArgument.
absl::StatusOr<std::string> OpenAddress(const std::string& sealed);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_SEALED_ADDRESS_H_

// The wire form of MessageHeader: 64 bytes, little-endian, with a magic number and a version.
//
//   offset  bytes  field
//        0      4  magic "FKVB"
//        4      2  version, 1
//        6      2  slot, 0: the bytes follow
//        8     16  transfer_id
//       24      4  attempt
//       28      4  kind
//       32     16  receiver_epoch
//       48      4  index
//       52      4  part
//       56      8  length

#ifndef KV_TRANSFER_MESSAGE_HEADER_H_
#define KV_TRANSFER_MESSAGE_HEADER_H_

#include <array>
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

inline constexpr size_t kMessageHeaderBytes = 64;

using WireHeader = std::array<std::byte, kMessageHeaderBytes>;

WireHeader EncodeMessageHeader(const MessageHeader& header);

// `raw` comes from another process and may hold anything.
// Errors: kInvalidArgument for another size, magic, version or kind, or a length above
// kMaxMessageBytes.
absl::StatusOr<MessageHeader> DecodeMessageHeader(absl::Span<const std::byte> raw);

// What a message carries, for errors: "block 3", "block 3 part 1", "state slot", "heartbeat".
std::string Cargo(const MessageHeader& header);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_MESSAGE_HEADER_H_

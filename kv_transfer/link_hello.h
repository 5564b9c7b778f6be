// The first words on a new UCX endpoint: who speaks, to whom, and in which session.
//
// UCX says of an incoming message only which endpoint it came over.  A hello binds that endpoint to
// the sender's epoch; until then every message over it is refused.  The acknowledgement tells the
// connecting side that the process it reached is the one it meant.
//
// A session counts the links that a process has made: a higher number from the same epoch means
// that the link of the lower one is gone at the other side, whatever this side believes.

#ifndef KV_TRANSFER_LINK_HELLO_H_
#define KV_TRANSFER_LINK_HELLO_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

struct LinkHello {
  enum class Kind : uint32_t {
    kHello = 1,
    kAccepted = 2,
    kWrongEpoch = 3,  // answers a hello that means another process
    kGoodbye = 4,     // the speaker closes this link; may get lost, as when the process is killed
  };
  Kind kind = Kind::kHello;
  Epoch from;
  Epoch to;
  uint64_t session = 0;       // the speaker's
  uint64_t peer_session = 0;  // in an answer: the session of the hello that it answers
};

inline constexpr size_t kLinkHelloBytes = 56;

// magic "FKVL", version 1 and kind (2 bytes each), from, to, session, peer_session; little-endian.
std::array<std::byte, kLinkHelloBytes> EncodeLinkHello(const LinkHello& hello);

// Errors: kInvalidArgument for anything else.
absl::StatusOr<LinkHello> DecodeLinkHello(absl::Span<const std::byte> raw);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_LINK_HELLO_H_

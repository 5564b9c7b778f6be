// What another worker sends: the handshake's request, message headers, hellos, addresses.

#include <span>
#include <string>

#include "ferry/v1/kv_transfer.pb.h"
#include "kv_transfer/link_hello.h"
#include "kv_transfer/message_header.h"
#include "kv_transfer/sealed_address.h"
#include "kv_transfer/socket_address.h"
#include "pairing/pair_check.h"
#include "status/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto header = kv_transfer::DecodeMessageHeader(bytes); header.ok()) {
    const kv_transfer::WireHeader again = kv_transfer::EncodeMessageHeader(*header);
    FERRY_CHECK(kv_transfer::DecodeMessageHeader(again).ok());
    FERRY_CHECK(!kv_transfer::Cargo(*header).empty());
  }
  if (const auto hello = kv_transfer::DecodeLinkHello(bytes); hello.ok()) {
    FERRY_CHECK(kv_transfer::DecodeLinkHello(kv_transfer::EncodeLinkHello(*hello)).ok());
  }
  if (const auto address = kv_transfer::OpenAddress(text); address.ok()) {
    FERRY_CHECK(kv_transfer::SealAddress(*address) == text);
  }
  (void)kv_transfer::ParseSocketAddress(text);
  ferry::v1::HandshakeRequest request;
  if (request.ParseFromString(text)) {
    const pairing::Profile theirs = pairing::ProfileOf(request, "prefill worker");
    pairing::Profile ours = pairing::ProfileOf(ferry::v1::HandshakeRequest(), "decode worker");
    const absl::Status fits = pairing::CheckPair(theirs, ours);
    FERRY_CHECK(fits.ok() || !fits.message().empty());
    // A pair of the same fits, but for links.
    FERRY_CHECK(theirs.links.empty() || pairing::CheckPair(theirs, theirs).ok())
        << pairing::CheckPair(theirs, theirs);
  }
  return 0;
}

#include "kv_transfer/message_header.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kv_transfer/little_endian.h"

namespace kv_transfer {
namespace {

constexpr uint32_t kMagic = 0x42564b46;  // "FKVB" in memory order
constexpr uint16_t kVersion = 1;

}  // namespace

WireHeader EncodeMessageHeader(const MessageHeader& header) {
  WireHeader raw{};
  StoreLittleEndian<uint32_t>(kMagic, raw.data());
  StoreLittleEndian<uint16_t>(kVersion, raw.data() + 4);
  StoreLittleEndian<uint16_t>(header.slot, raw.data() + 6);
  std::memcpy(raw.data() + 8, header.transfer_id.data(), header.transfer_id.size());
  StoreLittleEndian<uint32_t>(header.attempt, raw.data() + 24);
  StoreLittleEndian<uint32_t>(static_cast<uint32_t>(header.kind), raw.data() + 28);
  std::memcpy(raw.data() + 32, header.receiver_epoch.bytes.data(), 16);
  StoreLittleEndian<uint32_t>(header.index, raw.data() + 48);
  StoreLittleEndian<uint32_t>(header.part, raw.data() + 52);
  StoreLittleEndian<uint64_t>(header.length, raw.data() + 56);
  return raw;
}

absl::StatusOr<MessageHeader> DecodeMessageHeader(absl::Span<const std::byte> raw) {
  if (raw.size() != kMessageHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message header has 64 bytes, not ", raw.size()));
  }
  if (const auto magic = LoadLittleEndian<uint32_t>(raw.data()); magic != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat("message magic ", absl::Hex(magic)));
  }
  if (const auto version = LoadLittleEndian<uint16_t>(raw.data() + 4); version != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("message version ", version, ", this process knows ", kVersion));
  }
  const auto kind = LoadLittleEndian<uint32_t>(raw.data() + 28);
  if (kind < static_cast<uint32_t>(MessageKind::kBlock) ||
      kind > static_cast<uint32_t>(MessageKind::kSlotRefused)) {
    return absl::InvalidArgumentError(absl::StrCat("message kind ", kind));
  }
  MessageHeader header;
  header.slot = LoadLittleEndian<uint16_t>(raw.data() + 6);
  std::memcpy(header.transfer_id.data(), raw.data() + 8, header.transfer_id.size());
  header.attempt = LoadLittleEndian<uint32_t>(raw.data() + 24);
  header.kind = static_cast<MessageKind>(kind);
  std::memcpy(header.receiver_epoch.bytes.data(), raw.data() + 32, 16);
  header.index = LoadLittleEndian<uint32_t>(raw.data() + 48);
  header.part = LoadLittleEndian<uint32_t>(raw.data() + 52);
  header.length = LoadLittleEndian<uint64_t>(raw.data() + 56);
  if (header.length > static_cast<uint64_t>(kMaxMessageBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("message of ", header.length, " bytes"));
  }
  return header;
}

std::string Cargo(const MessageHeader& header) {
  if (header.kind == MessageKind::kHeartbeat) return "heartbeat";
  // There is one slot: its index says nothing unless it is wrong.
  std::string cargo = header.kind == MessageKind::kBlock ? absl::StrCat("block ", header.index)
                      : header.index == 0                ? "state slot"
                                          : absl::StrCat("state slot ", header.index);
  if (header.part > 0) absl::StrAppend(&cargo, " part ", header.part);
  return cargo;
}

}  // namespace kv_transfer

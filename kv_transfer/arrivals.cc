#include "kv_transfer/arrivals.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kv_transfer/message_header.h"
#include "status/check.h"

namespace kv_transfer {

Arrivals::Arrivals(const std::vector<absl::Span<std::byte>>& blocks,
                   absl::Span<std::byte> state_slot)
    : num_blocks_(static_cast<int32_t>(blocks.size())) {
  pieces_.reserve(blocks.size() + 1);
  size_t num_parts = 0;
  const auto add = [&](absl::Span<std::byte> memory) {
    Piece piece;
    piece.memory = memory;
    piece.first_part = num_parts;
    piece.num_parts = static_cast<uint32_t>(std::max<int64_t>(
        1, (static_cast<int64_t>(memory.size()) + kMaxMessageBytes - 1) / kMaxMessageBytes));
    num_parts += piece.num_parts;
    total_bytes_ += memory.size();
    pieces_.push_back(piece);
  };
  for (const absl::Span<std::byte> block : blocks) add(block);
  if (!state_slot.empty()) add(state_slot);
  parts_.resize(num_parts, Part::kExpected);
}

Arrivals::Piece* Arrivals::Find(const MessageHeader& header) {
  if (header.kind == MessageKind::kBlock) {
    return header.index < static_cast<uint32_t>(num_blocks_) ? &pieces_[header.index] : nullptr;
  }
  const bool has_slot = pieces_.size() > static_cast<size_t>(num_blocks_);
  return has_slot && header.index == 0 ? &pieces_.back() : nullptr;
}

absl::StatusOr<absl::Span<std::byte>> Arrivals::Start(const MessageHeader& header) {
  Piece* const piece = Find(header);
  if (piece == nullptr || header.part >= piece->num_parts) {
    const bool has_slot = pieces_.size() > static_cast<size_t>(num_blocks_);
    return absl::OutOfRangeError(absl::StrCat(Cargo(header), " is not reserved, ", num_blocks_,
                                              " blocks", has_slot ? " and a state slot" : "",
                                              " are"));
  }
  const size_t offset = static_cast<size_t>(header.part) * kMaxMessageBytes;
  const absl::Span<std::byte> memory = piece->memory.subspan(offset, kMaxMessageBytes);
  if (header.length != memory.size()) {
    return absl::InvalidArgumentError(absl::StrCat(Cargo(header), " of ", header.length,
                                                   " bytes, reserved were ", memory.size()));
  }
  Part& part = parts_[piece->first_part + header.part];
  if (part != Part::kExpected) {
    return absl::AlreadyExistsError(absl::StrCat(Cargo(header), " came before"));
  }
  part = Part::kStarted;
  ++num_started_;
  return memory;
}

void Arrivals::Finish(const MessageHeader& header, bool arrived) {
  Piece* const piece = Find(header);
  FERRY_CHECK(piece != nullptr) << Cargo(header);
  Part& part = parts_[piece->first_part + header.part];
  FERRY_CHECK(part == Part::kStarted) << Cargo(header) << " was not started";
  --num_started_;
  part = arrived ? Part::kArrived : Part::kFailed;
  if (!arrived) return;
  ++num_arrived_parts_;
  arrived_bytes_ += header.length;
  if (++piece->num_arrived == piece->num_parts && header.kind == MessageKind::kBlock) {
    ++arrived_blocks_;
  }
}

}  // namespace kv_transfer

// Arrivals: which parts of one transfer's destination are expected, being received, or there.
//
// A piece is a block of the reservation or the state slot; a piece above kMaxMessageBytes comes in
// parts, an empty one as one message without bytes.  Every part is received once.
//
// Thread-compatible: its owner (incoming_transfers.cc) holds a lock.

#ifndef KV_TRANSFER_ARRIVALS_H_
#define KV_TRANSFER_ARRIVALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

class Arrivals {
 public:
  Arrivals() = default;
  // An empty `state_slot` means that none is expected.
  Arrivals(const std::vector<absl::Span<std::byte>>& blocks, absl::Span<std::byte> state_slot);

  // Where the message's bytes go; it counts as started.  The header comes from another process.
  // Errors: kOutOfRange (no such block or part), kAlreadyExists (started or arrived before),
  // kInvalidArgument (another length than this part has).
  absl::StatusOr<absl::Span<std::byte>> Start(const MessageHeader& header);

  // REQUIRES: Start succeeded for this header.  A part that failed is not expected again.
  void Finish(const MessageHeader& header, bool arrived);

  bool complete() const { return num_arrived_parts_ == static_cast<int64_t>(parts_.size()); }
  int32_t num_started() const { return num_started_; }  // receives that have not completed
  int32_t num_blocks() const { return num_blocks_; }
  int32_t arrived_blocks() const { return arrived_blocks_; }  // whole ones
  uint64_t total_bytes() const { return total_bytes_; }       // of the blocks and the slot
  uint64_t arrived_bytes() const { return arrived_bytes_; }

 private:
  enum class Part : uint8_t { kExpected, kStarted, kArrived, kFailed };
  struct Piece {
    absl::Span<std::byte> memory;
    size_t first_part = 0;  // index into parts_
    uint32_t num_parts = 1;
    uint32_t num_arrived = 0;
  };

  Piece* Find(const MessageHeader& header);  // null if there is none

  std::vector<Piece> pieces_;  // the blocks in order, then the state slot if one is expected
  std::vector<Part> parts_;
  int32_t num_blocks_ = 0;
  int32_t num_started_ = 0;
  int64_t num_arrived_parts_ = 0;
  int32_t arrived_blocks_ = 0;
  uint64_t total_bytes_ = 0;
  uint64_t arrived_bytes_ = 0;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_ARRIVALS_H_

// BpeModel: byte-pair encoding of one piece.  Merges the adjacent pair of the lowest rank, the
// leftmost of equals, until no pair has a merge.
//
// Thread-safe: const after construction but for a cache of one byte per token (relaxed atomics).

#ifndef TOKENIZER_BPE_MODEL_H_
#define TOKENIZER_BPE_MODEL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tokenizer {

class BpeModel final {
 public:
  struct Merge {
    int32_t left;  // token ids
    int32_t right;
    int32_t merged;
  };

  // `token_bytes`: by id, "" for ids that text cannot become.  `merges`: best rank first; of two
  // for the same pair the later one counts.  `ignore_merges`: a piece that is a token is that
  // token. REQUIRES: every byte of valid UTF-8 is a token; ids of merges are in range.
  BpeModel(const std::vector<std::string>& token_bytes, const std::vector<Merge>& merges,
           bool ignore_merges);

  // Memory of a piece's merging; belongs to one thread.
  struct Scratch {
    struct Symbol {
      int32_t id;
      int32_t previous;  // index of the neighbour, -1: none
      int32_t next;
    };
    std::vector<int32_t> ids;
    std::vector<int32_t> ranks;
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;  // rank << 32 | index of the left symbol
  };

  // Appends the ids of `piece`.  O(n log n) in its bytes.  REQUIRES: piece is valid UTF-8 and not
  // empty.
  void Encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Rank {
    int32_t rank;
    int32_t merged;
  };
  enum WholeState : uint8_t { kUnknown, kWhole, kSplit };

  // Rank and result of merging a pair; rank INT32_MAX: no merge.
  Rank Find(int32_t left, int32_t right) const;
  void MergeShort(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;
  void MergeLong(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_;
  absl::flat_hash_map<std::string, int32_t> ids_by_bytes_;
  absl::flat_hash_map<uint64_t, Rank> ranks_;  // left << 32 | right
  const bool ignore_merges_;
  // By id: does merging a token's bytes give the token itself?  Learned at first use.
  std::unique_ptr<std::atomic<uint8_t>[]> whole_;
};

}  // namespace tokenizer

#endif  // TOKENIZER_BPE_MODEL_H_

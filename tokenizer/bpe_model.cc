#include "tokenizer/bpe_model.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>

#include "absl/strings/string_view.h"

namespace tokenizer {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
// Pieces up to here are merged by scanning the ranks: n^2 steps over a cache line or two beat a
// heap.
constexpr size_t kMaxShortBytes = 48;

uint64_t PairKey(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

BpeModel::BpeModel(const std::vector<std::string>& token_bytes, const std::vector<Merge>& merges,
                   bool ignore_merges)
    : ignore_merges_(ignore_merges),
      whole_(std::make_unique<std::atomic<uint8_t>[]>(token_bytes.size())) {
  byte_ids_.fill(-1);
  ids_by_bytes_.reserve(token_bytes.size());
  for (size_t id = 0; id < token_bytes.size(); ++id) {
    const std::string& bytes = token_bytes[id];
    if (bytes.empty()) continue;
    ids_by_bytes_.emplace(bytes, static_cast<int32_t>(id));
    if (bytes.size() == 1) byte_ids_[static_cast<uint8_t>(bytes[0])] = static_cast<int32_t>(id);
  }
  ranks_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    ranks_.insert_or_assign(PairKey(merge.left, merge.right),
                            Rank{static_cast<int32_t>(rank), merge.merged});
  }
}

BpeModel::Rank BpeModel::Find(int32_t left, int32_t right) const {
  const auto it = ranks_.find(PairKey(left, right));
  return it == ranks_.end() ? Rank{kNoRank, -1} : it->second;
}

void BpeModel::Encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (piece.size() == 1) {
    ids.push_back(byte_ids_[static_cast<uint8_t>(piece[0])]);
    return;
  }
  const auto it = ids_by_bytes_.find(absl::string_view(piece.data(), piece.size()));
  std::atomic<uint8_t>* whole = it == ids_by_bytes_.end() ? nullptr : &whole_[it->second];
  // Racing threads store the same answer.
  if (whole != nullptr && (ignore_merges_ || whole->load(std::memory_order_relaxed) == kWhole)) {
    ids.push_back(it->second);
    return;
  }
  const size_t before = ids.size();
  if (piece.size() <= kMaxShortBytes) {
    MergeShort(piece, scratch, ids);
  } else {
    MergeLong(piece, scratch, ids);
  }
  if (whole != nullptr) {
    const bool is_whole = ids.size() == before + 1 && ids.back() == it->second;
    whole->store(is_whole ? kWhole : kSplit, std::memory_order_relaxed);
  }
}

void BpeModel::MergeShort(std::string_view piece, Scratch& scratch,
                          std::vector<int32_t>& ids) const {
  std::vector<int32_t>& symbols = scratch.ids;
  std::vector<int32_t>& ranks = scratch.ranks;  // ranks[i]: of (symbols[i], symbols[i + 1])
  symbols.clear();
  ranks.clear();
  for (const char c : piece) symbols.push_back(byte_ids_[static_cast<uint8_t>(c)]);
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    ranks.push_back(Find(symbols[i], symbols[i + 1]).rank);
  }
  while (!ranks.empty()) {
    const auto best = std::min_element(ranks.begin(), ranks.end());
    if (*best == kNoRank) break;
    const size_t i = best - ranks.begin();
    symbols[i] = Find(symbols[i], symbols[i + 1]).merged;
    symbols.erase(symbols.begin() + i + 1);
    ranks.erase(best);
    if (i > 0) ranks[i - 1] = Find(symbols[i - 1], symbols[i]).rank;
    if (i < ranks.size()) ranks[i] = Find(symbols[i], symbols[i + 1]).rank;
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

void BpeModel::MergeLong(std::string_view piece, Scratch& scratch,
                         std::vector<int32_t>& ids) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  std::vector<uint64_t>& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  const auto size = static_cast<int32_t>(piece.size());
  for (int32_t i = 0; i < size; ++i) {
    symbols.push_back(
        {byte_ids_[static_cast<uint8_t>(piece[i])], i - 1, i + 1 < size ? i + 1 : -1});
  }
  const auto entry = [&](int32_t left) {
    const int32_t right = symbols[left].next;
    const int32_t rank = right < 0 ? kNoRank : Find(symbols[left].id, symbols[right].id).rank;
    return uint64_t{static_cast<uint32_t>(rank)} << 32 | static_cast<uint32_t>(left);
  };
  const auto is_merge = [](uint64_t e) { return static_cast<int32_t>(e >> 32) != kNoRank; };
  for (int32_t i = 0; i + 1 < size; ++i) {
    if (const uint64_t e = entry(i); is_merge(e)) heap.push_back(e);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto left = static_cast<int32_t>(top & 0xFFFFFFFFu);
    // Stale: one of the two has been merged since.
    if (symbols[left].id < 0 || entry(left) != top) continue;
    const int32_t right = symbols[left].next;
    symbols[left].id = Find(symbols[left].id, symbols[right].id).merged;
    symbols[left].next = symbols[right].next;
    if (symbols[right].next >= 0) symbols[symbols[right].next].previous = left;
    symbols[right].id = -1;
    for (const int32_t start : {symbols[left].previous, left}) {
      if (start < 0) continue;
      if (const uint64_t e = entry(start); is_merge(e)) {
        heap.push_back(e);
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
      }
    }
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace tokenizer

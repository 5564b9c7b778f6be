// Blocks of a transfer in tests, and the bytes that they are checked by.

#ifndef TESTS_KV_TRANSFER_BLOCKS_H_
#define TESTS_KV_TRANSFER_BLOCKS_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "tests/kv_transfer/test_memory.h"

namespace kv_transfer {

// Bytes that depend on the seed and the position.
inline void FillPattern(absl::Span<std::byte> block, uint64_t seed) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;
  for (size_t i = 0; i < block.size(); i += sizeof(x)) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t mixed = x ^ (x >> 29);
    std::memcpy(block.data() + i, &mixed, std::min(sizeof(mixed), block.size() - i));
  }
}
inline constexpr std::byte kPoison{0xdd};

inline bool HasPattern(absl::Span<const std::byte> block, uint64_t seed) {
  std::vector<std::byte> expected(block.size());
  FillPattern(absl::MakeSpan(expected), seed);
  return block.empty() || std::memcmp(expected.data(), block.data(), block.size()) == 0;
}
// Bytes that are not poison.  Compared in chunks, as a sanitizer makes looking at each byte slow.
inline int64_t CountForeign(absl::Span<const std::byte> block) {
  static const std::vector<std::byte> poison(64 << 10, kPoison);
  int64_t foreign = 0;
  for (; !block.empty(); block.remove_prefix(std::min(poison.size(), block.size()))) {
    const auto chunk = block.subspan(0, poison.size());
    if (std::memcmp(chunk.data(), poison.data(), chunk.size()) == 0) continue;
    for (const std::byte b : chunk) foreign += b != kPoison;
  }
  return foreign;
}

// Blocks of TestMemory, each of its own length.
class Blocks {
 public:
  Blocks(int32_t count, size_t bytes) : Blocks(std::vector<size_t>(count, bytes)) {}
  explicit Blocks(const std::vector<size_t>& lengths) {
    for (const size_t length : lengths) {
      memory_.push_back(TestMemory::Get().Allocate(length));
      spans_.emplace_back(memory_.back()->data(), length);
    }
    Poison();
  }
  void Fill(uint64_t seed) {
    for (size_t i = 0; i < spans_.size(); ++i) {
      std::vector<std::byte> pattern(spans_[i].size());
      FillPattern(absl::MakeSpan(pattern), seed + i);
      TestMemory::Get().Write(spans_[i], pattern);
    }
  }
  void Poison() {
    for (const absl::Span<std::byte> block : spans_) {
      TestMemory::Get().Write(block, std::vector<std::byte>(block.size(), kPoison));
    }
  }
  bool HavePattern(uint64_t seed) const {
    for (size_t i = 0; i < spans_.size(); ++i) {
      if (!BlockHasPattern(i, seed + i)) return false;
    }
    return true;
  }
  bool BlockHasPattern(size_t i, uint64_t seed) const { return HasPattern(Bytes(i), seed); }
  int64_t Foreign() const {
    int64_t foreign = 0;
    for (size_t i = 0; i < spans_.size(); ++i) foreign += BlockForeign(i);
    return foreign;
  }
  int64_t BlockForeign(size_t i) const { return CountForeign(Bytes(i)); }
  const std::vector<absl::Span<std::byte>>& spans() const { return spans_; }
  absl::Span<std::byte> operator[](size_t i) { return spans_[i]; }
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }
  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const absl::Span<std::byte> block : spans_) bytes += block.size();
    return bytes;
  }

 private:
  std::vector<std::byte> Bytes(size_t i) const {
    std::vector<std::byte> bytes(spans_[i].size());
    TestMemory::Get().Read(absl::MakeSpan(bytes), spans_[i]);
    return bytes;
  }

  std::vector<std::unique_ptr<kernels::Buffer>> memory_;
  std::vector<absl::Span<std::byte>> spans_;
};

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_BLOCKS_H_

// HashParts: a map by block hash, in parts chosen by bits of the hash.  A hash table that grows, or
// tidies up what erasures left, moves all its entries at once; here only those of one part, so that
// no single change of a large map takes long.
//
// Thread-compatible.

#ifndef ROUTER_HASH_PARTS_H_
#define ROUTER_HASH_PARTS_H_

#include <array>
#include <cstddef>

#include "absl/container/flat_hash_map.h"
#include "block_hash/block_hash.h"

namespace router {

// `kParts`: a power of two, at most 65536; so that a part of the largest map holds about a thousand
// entries, and all of them together are few enough to stay in a core's cache.
template <typename Value, size_t kParts>
class HashParts final {
 public:
  using Part = absl::flat_hash_map<block_hash::BlockHash, Value>;

  // Null: it is not there.  Valid until the next insertion.
  Value* Find(const block_hash::BlockHash& hash) {
    Part& part = PartOf(hash);
    const auto it = part.find(hash);
    return it == part.end() ? nullptr : &it->second;
  }
  const Value* Find(const block_hash::BlockHash& hash) const {
    return const_cast<HashParts*>(this)->Find(hash);
  }
  // Makes the entry if need be.
  Value& operator[](const block_hash::BlockHash& hash) {
    Part& part = PartOf(hash);
    const size_t before = part.size();
    Value& value = part[hash];
    size_ += part.size() - before;
    return value;
  }
  // Shows the entry, if it is there, to `done`, and erases it if that returns true.  Returns
  // whether it is erased.
  template <typename Done>
  bool EraseIf(const block_hash::BlockHash& hash, const Done& done) {
    Part& part = PartOf(hash);
    const auto it = part.find(hash);
    if (it == part.end() || !done(it->second)) return false;
    part.erase(it);
    --size_;
    return true;
  }
  bool Erase(const block_hash::BlockHash& hash) {
    return EraseIf(hash, [](const Value&) { return true; });
  }

  // Takes a part out, its memory included.  REQUIRES: index < kParts.
  Part TakePart(size_t index) {
    Part taken;
    taken.swap(parts_[index]);
    size_ -= taken.size();
    return taken;
  }

  size_t size() const { return size_; }
  size_t approximate_bytes() const {
    size_t bytes = 0;
    for (const Part& part : parts_) {
      bytes += part.capacity() * (sizeof(typename Part::value_type) + 1);
    }
    return bytes;
  }

 private:
  static_assert(kParts > 0 && kParts <= 65536 && (kParts & (kParts - 1)) == 0);
  // Not the bits that the tables use: those are of a hash of the hash.
  Part& PartOf(const block_hash::BlockHash& hash) {
    return parts_[(hash.bytes[0] | size_t{hash.bytes[1]} << 8) & (kParts - 1)];
  }

  std::array<Part, kParts> parts_;
  size_t size_ = 0;
};

}  // namespace router

#endif  // ROUTER_HASH_PARTS_H_

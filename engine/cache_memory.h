// CacheMemory: the bytes behind token blocks or state slots, mapped with huge pages (4 KiB pages
// cost TCP a factor of ten).  The worker maps it, registers it with the transport, and lends it to
// the engine.

#ifndef ENGINE_CACHE_MEMORY_H_
#define ENGINE_CACHE_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace engine {

class CacheMemory final {
 public:
  // Zeroed, page-aligned memory.  Errors: kResourceExhausted naming the size.
  static absl::StatusOr<CacheMemory> Map(int64_t size_bytes);
  // Addresses alone, of which none may be touched: of a cache that a device has in its own memory.
  static absl::StatusOr<CacheMemory> Reserve(int64_t size_bytes);
  CacheMemory(CacheMemory&& other) noexcept;
  CacheMemory& operator=(CacheMemory&& other) noexcept;
  ~CacheMemory();

  std::byte* data() const { return data_; }
  absl::Span<std::byte> span() const { return {data_, static_cast<size_t>(size_bytes_)}; }

 private:
  static absl::StatusOr<CacheMemory> MapWith(int protection, int64_t size_bytes);
  CacheMemory(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace engine

#endif  // ENGINE_CACHE_MEMORY_H_

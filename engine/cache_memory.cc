#include "engine/cache_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace engine {

absl::StatusOr<CacheMemory> CacheMemory::Map(int64_t size_bytes) {
  return MapWith(PROT_READ | PROT_WRITE, size_bytes);
}

absl::StatusOr<CacheMemory> CacheMemory::Reserve(int64_t size_bytes) {
  return MapWith(PROT_NONE, size_bytes);
}

absl::StatusOr<CacheMemory> CacheMemory::MapWith(int protection, int64_t size_bytes) {
  void* memory = mmap(nullptr, size_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", size_bytes, " bytes of cache: ", std::strerror(errno)));
  }
  madvise(memory, size_bytes,
          MADV_HUGEPAGE);  // advice only: a kernel without huge pages still works
  return CacheMemory(static_cast<std::byte*>(memory), size_bytes);
}

CacheMemory::CacheMemory(CacheMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

CacheMemory& CacheMemory::operator=(CacheMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

CacheMemory::~CacheMemory() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

}  // namespace engine

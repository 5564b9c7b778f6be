// Integers in the byte order of the wire.

#ifndef KV_TRANSFER_LITTLE_ENDIAN_H_
#define KV_TRANSFER_LITTLE_ENDIAN_H_

#include <cstddef>
#include <cstdint>

namespace kv_transfer {

template <typename T>
void StoreLittleEndian(T value, std::byte* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out[i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
  }
}

template <typename T>
T LoadLittleEndian(const std::byte* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(in[i]) << (8 * i);
  return static_cast<T>(value);
}

}  // namespace kv_transfer

#endif  // KV_TRANSFER_LITTLE_ENDIAN_H_

// Memory and streams of the current CUDA device, each owned by one object.
// Thread-compatible.  Destructors wait for work that may still use the memory, as CUDA does.

#ifndef KERNELS_CUDA_DEVICE_MEMORY_H_
#define KERNELS_CUDA_DEVICE_MEMORY_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace kernels::cuda {

class DeviceBuffer final : public Buffer {
 public:
  // At least one byte, at an address that is a multiple of 256; not zeroed.
  // Errors: kResourceExhausted naming the size.
  static absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t size_bytes);
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() override { cudaFree(data_); }

  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  DeviceBuffer(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_;
  int64_t size_bytes_;
};

// Pinned host memory.
class PinnedBuffer final : public Buffer {
 public:
  // As DeviceBuffer::Allocate, but zeroed.
  static absl::StatusOr<std::unique_ptr<PinnedBuffer>> Allocate(int64_t size_bytes);
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() override { cudaFreeHost(data_); }

  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  PinnedBuffer(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_;
  int64_t size_bytes_;
};

class Stream final {
 public:
  static absl::StatusOr<Stream> Create();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream_;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_DEVICE_MEMORY_H_

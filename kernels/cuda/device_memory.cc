#include "kernels/cuda/device_memory.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"

namespace kernels::cuda {

absl::StatusOr<std::unique_ptr<DeviceBuffer>> DeviceBuffer::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("buffer of ", size_bytes, " bytes"));
  }
  void* data = nullptr;
  const cudaError_t error =
      cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(size_bytes, 1)));
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return ToStatus(error, absl::StrCat("allocating ", size_bytes, " bytes"));
  }
  return std::unique_ptr<DeviceBuffer>(new DeviceBuffer(static_cast<std::byte*>(data), size_bytes));
}

absl::StatusOr<std::unique_ptr<PinnedBuffer>> PinnedBuffer::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("buffer of ", size_bytes, " bytes"));
  }
  void* data = nullptr;
  const auto size = static_cast<size_t>(std::max<int64_t>(size_bytes, 1));
  const cudaError_t error = cudaHostAlloc(&data, size, cudaHostAllocDefault);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return ToStatus(error, absl::StrCat("allocating ", size_bytes, " bytes of pinned memory"));
  }
  std::memset(data, 0, size);
  return std::unique_ptr<PinnedBuffer>(new PinnedBuffer(static_cast<std::byte*>(data), size_bytes));
}

absl::StatusOr<Stream> Stream::Create() {
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return ToStatus(error, "creating a stream");
  return Stream(stream);
}

}  // namespace kernels::cuda

#include <cuda_runtime.h>

#include "kernels/cuda/device_copies.h"
#include "kernels/cuda/device_memory.h"
#include "status/check.h"
#include "tests/kv_transfer/test_memory.h"

namespace kv_transfer {
namespace {

class CudaTestMemory final : public TestMemory {
 public:
  std::unique_ptr<kernels::Buffer> Allocate(size_t bytes) override {
    auto buffer = kernels::cuda::DeviceBuffer::Allocate(static_cast<int64_t>(bytes));
    FERRY_CHECK(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  void Write(absl::Span<std::byte> memory, absl::Span<const std::byte> host) override {
    Copy(memory.data(), host.data(), host.size());
  }
  void Read(absl::Span<std::byte> host, absl::Span<const std::byte> memory) override {
    Copy(host.data(), memory.data(), host.size());
  }
  std::unique_ptr<kernels::DeviceCopies> MakeCopies() override {
    auto copies = kernels::cuda::CreateDeviceCopies();
    FERRY_CHECK(copies.ok()) << copies.status();
    return *std::move(copies);
  }
  bool on_device() const override { return true; }
  void EnterThread() override {
    const absl::Status status = kernels::cuda::EnterThread();
    FERRY_CHECK(status.ok()) << status;
  }

 private:
  static void Copy(void* to, const void* from, size_t size) {
    cudaError_t error = cudaMemcpy(to, from, size, cudaMemcpyDefault);
    // It returns before the device has what comes from pageable memory.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    FERRY_CHECK(error == cudaSuccess) << cudaGetErrorString(error);
  }
};

}  // namespace

std::unique_ptr<TestMemory> CreateCudaTestMemory() { return std::make_unique<CudaTestMemory>(); }

}  // namespace kv_transfer

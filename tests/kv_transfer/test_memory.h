// TestMemory: where the blocks of transport tests lie: in the host's memory, or with
// FERRY_TEST_MEMORY=cuda, in a build with CUDA, in the GPU's.
//
// Thread-safe.

#ifndef TESTS_KV_TRANSFER_TEST_MEMORY_H_
#define TESTS_KV_TRANSFER_TEST_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/types/span.h"
#include "kernels/device_copies.h"

namespace kv_transfer {

class TestMemory {
 public:
  virtual ~TestMemory() = default;
  virtual std::unique_ptr<kernels::Buffer> Allocate(size_t bytes) = 0;
  virtual void Write(absl::Span<std::byte> memory, absl::Span<const std::byte> host) = 0;
  virtual void Read(absl::Span<std::byte> host, absl::Span<const std::byte> memory) = 0;
  // Those of a staged transport over this memory.
  virtual std::unique_ptr<kernels::DeviceCopies> MakeCopies() = 0;
  virtual bool on_device() const = 0;
  // Before a library that asks for the thread's device is used on the thread.
  virtual void EnterThread() = 0;

  // The process's.
  static TestMemory& Get();
};

// Null in a build without CUDA.
std::unique_ptr<TestMemory> CreateCudaTestMemory();

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_TEST_MEMORY_H_

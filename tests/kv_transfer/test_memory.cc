#include "tests/kv_transfer/test_memory.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "status/check.h"
#include "tests/fakes/host_copies.h"

namespace kv_transfer {
namespace {

class HostTestMemory final : public TestMemory {
 public:
  std::unique_ptr<kernels::Buffer> Allocate(size_t bytes) override {
    return fakes::MakeHostBuffer(static_cast<int64_t>(bytes));
  }
  void Write(absl::Span<std::byte> memory, absl::Span<const std::byte> host) override {
    if (!host.empty()) std::memcpy(memory.data(), host.data(), host.size());
  }
  void Read(absl::Span<std::byte> host, absl::Span<const std::byte> memory) override {
    if (!host.empty()) std::memcpy(host.data(), memory.data(), host.size());
  }
  std::unique_ptr<kernels::DeviceCopies> MakeCopies() override { return fakes::CreateHostCopies(); }
  bool on_device() const override { return false; }
  void EnterThread() override {}
};

std::unique_ptr<TestMemory> Create() {
  const char* const wanted = std::getenv("FERRY_TEST_MEMORY");
  if (wanted == nullptr) return std::make_unique<HostTestMemory>();
  std::unique_ptr<TestMemory> memory =
      std::string(wanted) == "cuda" ? CreateCudaTestMemory() : nullptr;
  FERRY_CHECK(memory != nullptr) << "FERRY_TEST_MEMORY=" << wanted << " is not in this build";
  return memory;
}

}  // namespace

TestMemory& TestMemory::Get() {
  static TestMemory& memory = *Create().release();  // outlives what other statics hold
  return memory;
}

}  // namespace kv_transfer

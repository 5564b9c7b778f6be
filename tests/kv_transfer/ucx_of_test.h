// A UCX transport by the name that the suites run it under: a kind of link, and behind it how the
// blocks' memory gets there: nothing if UCX sees it as the host's, "_staged" if only a device's
// copies do, "_shared" if both sides' copies use the same slots, "_device" if the link takes a
// device's.

#ifndef TESTS_KV_TRANSFER_UCX_OF_TEST_H_
#define TESTS_KV_TRANSFER_UCX_OF_TEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "kv_transfer/shared_slots.h"
#include "kv_transfer/staged_transport.h"
#include "kv_transfer/ucx_transport.h"
#include "status/check.h"
#include "tests/kv_transfer/test_memory.h"

namespace kv_transfer {

inline std::string LinkKindOf(const std::string& name) { return name.substr(0, name.find('_')); }

struct SlotsOfTest {
  uint16_t num_shared = 6;  // fewer than a link would use
  int64_t bytes = kMaxMessageBytes;
};

// `inner` itself, or staged.
inline std::unique_ptr<Transport> StageIfNamed(const std::string& name,
                                               std::unique_ptr<Transport> inner,
                                               kernels::DeviceCopies* copies,
                                               const SlotsOfTest& slots = {}) {
  if (LinkKindOf(name) == name) return inner;
  std::unique_ptr<SharedSlots> shared;
  if (absl::EndsWith(name, "_shared")) {
    auto made = SharedSlots::Create(copies, slots.num_shared, slots.bytes);
    FERRY_CHECK(made.ok()) << made.status();
    shared = *std::move(made);
  }
  return CreateStagedTransport(std::move(inner), copies, slots.bytes, std::move(shared));
}

inline absl::StatusOr<std::unique_ptr<Transport>> MakeUcx(const std::string& name,
                                                          const Epoch& epoch,
                                                          kernels::DeviceCopies* copies,
                                                          const SlotsOfTest& slots = {}) {
  UcxOptions options;
  options.epoch = epoch;
  options.link_kinds = {LinkKindOf(name)};
  options.listen_ip = "127.0.0.1";
  options.device_memory = absl::EndsWith(name, "_device");
  if (options.device_memory) options.enter_thread = [] { TestMemory::Get().EnterThread(); };
  absl::StatusOr<std::unique_ptr<Transport>> ucx = CreateUcxTransport(options);
  if (!ucx.ok()) return ucx.status();
  std::unique_ptr<Transport> transport = StageIfNamed(name, *std::move(ucx), copies, slots);
  if (options.device_memory) {
    // All that a test moves is the device's.
    const absl::Span<std::byte> everything(reinterpret_cast<std::byte*>(1), SIZE_MAX / 2);
    const absl::Status status = transport->Register(everything, MemoryKind::kDevice);
    if (!status.ok()) return status;
  }
  return transport;
}

// Of these names those that fit the memory of the tests' blocks.
inline std::vector<std::string> OfTestMemory(std::vector<std::string> names) {
  if (TestMemory::Get().on_device()) {
    std::erase_if(names, [](const std::string& name) { return LinkKindOf(name) == name; });
  }
  return names;
}

// And of a device that the UCX at hand knows, links that take it: they are between processes.
inline std::vector<std::string> OfTestMemoryAndLinks(std::vector<std::string> names) {
  names = OfTestMemory(std::move(names));
  if (!TestMemory::Get().on_device()) return names;
  TestMemory::Get().EnterThread();
  if (UcxKnowsDeviceMemory()) names.push_back("shm_device");
  return names;
}

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_UCX_OF_TEST_H_

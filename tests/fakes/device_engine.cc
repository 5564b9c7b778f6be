#include "tests/fakes/device_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/fakes/host_copies.h"

namespace fakes {
namespace {

constexpr std::byte kPoison{0xA5};

class DeviceEngine final : public engine::Engine {
 public:
  explicit DeviceEngine(std::unique_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}

  const model::Network& network() const override { return engine_->network(); }
  const model::CacheLayout& cache_layout() const override { return engine_->cache_layout(); }
  const model::StepLimits& limits() const override { return engine_->limits(); }
  int32_t num_penalty_slots() const override { return engine_->num_penalty_slots(); }
  absl::StatusOr<engine::StepHandle> Launch(const model::StepPlan& plan) override {
    return engine_->Launch(plan);
  }
  absl::StatusOr<engine::StepResult> Collect(engine::StepHandle handle) override {
    return engine_->Collect(handle);
  }

  void SetCache(absl::Span<std::byte> token_blocks, absl::Span<std::byte> state_slots) override {
    const auto place = [](absl::Span<std::byte> host, std::vector<std::byte>& device) {
      std::fill(host.begin(), host.end(), kPoison);
      device.assign(host.size(), std::byte{0});
    };
    place(token_blocks, blocks_);
    place(state_slots, slots_);
    engine_->SetCache(absl::MakeSpan(blocks_), absl::MakeSpan(slots_));
  }
  engine::CacheSpans cache() const override { return engine_->cache(); }
  absl::StatusOr<std::unique_ptr<kernels::DeviceCopies>> MakeCopies() override {
    return CreateHostCopies();
  }

 private:
  std::vector<std::byte> blocks_;
  std::vector<std::byte> slots_;
  std::unique_ptr<engine::Engine> engine_;  // uses the memory
};

}  // namespace

std::unique_ptr<engine::Engine> WithDeviceMemory(std::unique_ptr<engine::Engine> engine) {
  return std::make_unique<DeviceEngine>(std::move(engine));
}

}  // namespace fakes

#include "tests/fakes/device_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

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
    blocks_.Place(token_blocks, cache_layout().block_bytes());
    slots_.Place(state_slots, cache_layout().spec().state_slot_bytes);
    engine_->SetCache(absl::MakeSpan(blocks_.device), absl::MakeSpan(slots_.device));
  }
  absl::Status ExportCache(const engine::CachePieces& pieces) override {
    for (const int32_t block : pieces.blocks) blocks_.Export(block);
    if (pieces.state_slot >= 0) slots_.Export(pieces.state_slot);
    return absl::OkStatus();
  }
  absl::Status ImportCache(const engine::CachePieces& pieces) override {
    for (const int32_t block : pieces.blocks) blocks_.Import(block);
    if (pieces.state_slot >= 0) slots_.Import(pieces.state_slot);
    return absl::OkStatus();
  }

 private:
  struct Mirror {
    absl::Span<std::byte> host;
    std::vector<std::byte> device;
    int64_t piece_bytes = 0;

    void Place(absl::Span<std::byte> memory, int64_t bytes) {
      host = memory;
      piece_bytes = bytes;
      std::fill(host.begin(), host.end(), kPoison);
      device.assign(host.size(), std::byte{0});
    }
    void Export(int64_t piece) {
      std::copy_n(device.data() + piece * piece_bytes, piece_bytes,
                  host.data() + piece * piece_bytes);
    }
    void Import(int64_t piece) {
      std::copy_n(host.data() + piece * piece_bytes, piece_bytes,
                  device.data() + piece * piece_bytes);
    }
  };

  Mirror blocks_;
  Mirror slots_;
  std::unique_ptr<engine::Engine> engine_;  // uses the mirrors' memory
};

}  // namespace

std::unique_ptr<engine::Engine> WithDeviceMemory(std::unique_ptr<engine::Engine> engine) {
  return std::make_unique<DeviceEngine>(std::move(engine));
}

}  // namespace fakes

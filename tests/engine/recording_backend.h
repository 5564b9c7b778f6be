// A backend with memory of its own, on the host, that runs no operation: it counts what an engine
// records and replays.

#ifndef TESTS_ENGINE_RECORDING_BACKEND_H_
#define TESTS_ENGINE_RECORDING_BACKEND_H_

#include <cstring>
#include <functional>
#include <memory>

#include "kernels/cpu/cpu_backend.h"

namespace engine {

class RecordingBackend final : public kernels::Backend {
 public:
  int32_t num_recorded = 0;
  int32_t num_replayed = 0;

  std::string_view name() const override { return "recording"; }
  kernels::AttentionBackend& attention() override { return cpu_->attention(); }
  bool uses_host_memory() const override { return false; }
  absl::Status Synchronize(const kernels::LaunchContext&) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(int64_t size_bytes) override {
    return cpu_->Allocate(size_bytes);
  }
  absl::Status CopyToDevice(const kernels::LaunchContext&, std::byte* device,
                            absl::Span<const std::byte> host) override {
    std::memcpy(device, host.data(), host.size());
    return absl::OkStatus();
  }
  absl::Status CopyToHost(const kernels::LaunchContext&, absl::Span<std::byte> host,
                          const std::byte* device) override {
    std::memcpy(host.data(), device, host.size());
    return absl::OkStatus();
  }
  absl::Status CopyBlocks(const kernels::LaunchContext&, std::byte*, int64_t,
                          absl::Span<const int32_t>, absl::Span<const int32_t>) override {
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<kernels::Recording>> Record(
      absl::FunctionRef<absl::Status()>) override {
    ++num_recorded;
    return std::make_unique<Replayed>(*this);
  }
  std::function<absl::Status()> on_replay;  // stands for the recorded launches

  absl::StatusOr<std::unique_ptr<kernels::PackedLinear>> PackLinear(
      absl::Span<const kernels::WeightTensor>) override {
    return No();
  }
  absl::StatusOr<std::unique_ptr<kernels::PackedHeadLinear>> PackHeadLinear(
      const kernels::WeightTensor&, const kernels::HeadSlice&) override {
    return No();
  }
  absl::StatusOr<std::unique_ptr<kernels::PackedExperts>> PackExperts(
      absl::Span<const kernels::ExpertTensors>, absl::Span<const kernels::ExpertTensors>) override {
    return No();
  }
  using Context = kernels::LaunchContext;
  absl::Status Embed(const Context&, const kernels::EmbedParams&) override { return No(); }
  absl::Status Linear(const Context&, const kernels::LinearParams&) override { return No(); }
  int64_t LinearWorkspaceBytes(int32_t, int64_t) const override { return 0; }
  absl::Status HeadLinear(const Context&, const kernels::HeadLinearParams&) override {
    return No();
  }
  absl::Status Rope(const Context&, const kernels::RopeParams&) override { return No(); }
  absl::Status StoreKv(const Context&, const kernels::StoreKvParams&) override { return No(); }
  absl::Status CopyKvEntries(const Context&, const kernels::CopyKvEntriesParams&) override {
    return No();
  }
  absl::Status GatherKv(const Context&, const kernels::GatherKvParams&) override { return No(); }
  absl::Status IndexerLogits(const Context&, const kernels::IndexerLogitsParams&) override {
    return No();
  }
  absl::Status TopKSlots(const Context&, const kernels::TopKSlotsParams&) override { return No(); }
  absl::Status Moe(const Context&, const kernels::MoeParams&) override { return No(); }
  int64_t MoeWorkspaceBytes(int32_t, const kernels::GateConfig&, int64_t, int64_t,
                            int64_t) const override {
    return 0;
  }
  absl::Status CompressKv(const Context&, const kernels::CompressKvParams&) override {
    return No();
  }
  absl::Status C128AMetadata(const Context&, const kernels::C128AMetadataParams&) override {
    return No();
  }
  absl::Status WindowSlots(const Context&, const kernels::WindowSlotsParams&) override {
    return No();
  }
  absl::Status HyperPre(const Context&, const kernels::HyperPreParams&) override { return No(); }
  absl::Status HyperPost(const Context&, const kernels::HyperPostParams&) override { return No(); }
  absl::Status HeadAndSample(const Context&, const kernels::HeadAndSampleParams&) override {
    return No();
  }
  int64_t HeadAndSampleWorkspaceBytes(int32_t, int64_t, int32_t) const override { return 0; }

 private:
  class Replayed final : public kernels::Recording {
   public:
    explicit Replayed(RecordingBackend& backend) : backend_(backend) {}
    absl::Status Replay(const kernels::LaunchContext&) override {
      ++backend_.num_replayed;
      return backend_.on_replay();
    }

   private:
    RecordingBackend& backend_;
  };
  static absl::Status No() { return absl::UnimplementedError("an operation"); }

  std::unique_ptr<kernels::Backend> cpu_ = kernels::cpu::CreateCpuBackend(1);
};

}  // namespace engine

#endif  // TESTS_ENGINE_RECORDING_BACKEND_H_

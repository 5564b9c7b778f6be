#include "kernels/cuda/cuda_backend.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/absorbed_decode.h"
#include "kernels/cuda/bfloat16_weight.h"
#include "kernels/cuda/c128a_metadata.h"
#include "kernels/cuda/compress_kv.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/embed.h"
#include "kernels/cuda/graph_recording.h"
#include "kernels/cuda/head_and_sample.h"
#include "kernels/cuda/hyper_connection.h"
#include "kernels/cuda/indexer.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/ragged_mha.h"
#include "kernels/cuda/sparse_decode.h"
#include "kernels/cuda/store_entries.h"
#include "kernels/cuda/store_kv.h"
#include "kernels/cuda/stored_matrix.h"
#include "kernels/cuda/window_slots.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

// The device, the stream of null contexts, and the fault word: what every launch goes through.
class Runtime {
 public:
  static absl::StatusOr<std::unique_ptr<Runtime>> Open(const CudaOptions& options) {
    ASSIGN_OR_RETURN(Device device, OpenDevice());
    device.bfloat16 = options.bfloat16;
    ASSIGN_OR_RETURN(Stream stream, Stream::Create());
    void* fault = nullptr;
    RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&fault, sizeof(Fault), cudaHostAllocMapped),
                             "allocating pinned memory"));
    device.fault = new (fault) Fault{};
    constexpr int64_t kTicketBytes = kMaxTickets * sizeof(uint32_t);
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceBuffer> tickets, DeviceBuffer::Allocate(kTicketBytes));
    RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(tickets->data(), 0, kTicketBytes, stream.get()),
                             "clearing tickets"));
    device.tickets = reinterpret_cast<uint32_t*>(tickets->data());
    return std::unique_ptr<Runtime>(
        new Runtime(std::move(device), std::move(stream), std::move(tickets)));
  }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime() {
    cudaStreamSynchronize(stream_.get());
    cudaFreeHost(device_.fault);
  }

  Launcher On(const LaunchContext& context) const {
    return {device_,
            context.stream == nullptr ? stream_.get() : static_cast<cudaStream_t>(context.stream)};
  }

  const Device& device() const { return device_; }

  absl::Status Synchronize(const LaunchContext& context) const {
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(On(context).stream), "running a step"));
    return FaultStatus(*device_.fault);
  }

 private:
  Runtime(Device device, Stream stream, std::unique_ptr<DeviceBuffer> tickets)
      : device_(std::move(device)), stream_(std::move(stream)), tickets_(std::move(tickets)) {}

  Device device_;
  Stream stream_;
  std::unique_ptr<DeviceBuffer> tickets_;
};

class CudaAttention final : public AttentionBackend {
 public:
  explicit CudaAttention(const Runtime& runtime) : runtime_(runtime) {}

  DType ragged_kv_dtype() const override {
    return runtime_.device().bfloat16 ? DType::kBfloat16 : DType::kFloat32;
  }
  int32_t ragged_piece_tokens() const override { return 4096; }

  absl::Status RaggedMha(const LaunchContext& context, const RaggedMhaParams& params) override {
    return cuda::RaggedMha(runtime_.On(context), params);
  }
  absl::Status AbsorbedDecode(const LaunchContext& context,
                              const AbsorbedDecodeParams& params) override {
    return cuda::AbsorbedDecode(runtime_.On(context), params);
  }
  int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                       int32_t num_heads, int32_t kv_lora_rank) const override {
    return cuda::AbsorbedDecodeWorkspaceBytes(max_rows, max_splits_per_seq, num_heads,
                                              kv_lora_rank);
  }
  absl::Status SparseDecode(const LaunchContext& context,
                            const SparseDecodeParams& params) override {
    return cuda::SparseDecode(runtime_.On(context), params);
  }
  absl::Status SparsePrefill(const LaunchContext& context,
                             const SparseDecodeParams& params) override {
    return cuda::SparseDecode(runtime_.On(context), params);
  }
  int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t max_width, int32_t num_heads,
                                     int32_t value_dim) const override {
    return cuda::SparseDecodeWorkspaceBytes(max_rows, max_width, num_heads, value_dim);
  }

 private:
  const Runtime& runtime_;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), attention_(*runtime_) {}

  std::string_view name() const override { return "cuda"; }
  AttentionBackend& attention() override { return attention_; }
  bool uses_host_memory() const override { return false; }
  absl::Status Synchronize(const LaunchContext& context) override {
    return runtime_->Synchronize(context);
  }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t size_bytes) override {
    ASSIGN_OR_RETURN(std::unique_ptr<DeviceBuffer> buffer, DeviceBuffer::Allocate(size_bytes));
    RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(buffer->data(), 0, static_cast<size_t>(size_bytes),
                                             runtime_->On({}).stream),
                             "clearing a buffer"));
    return buffer;
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t size_bytes) override {
    return PinnedBuffer::Allocate(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<Recording>> Record(
      absl::FunctionRef<absl::Status()> launch) override {
    return RecordGraph(runtime_->On({}).stream, launch);
  }
  absl::StatusOr<std::unique_ptr<Timer>> MakeTimer() override {
    return EventTimer::Create(runtime_->On({}));
  }

  absl::Status CopyToDevice(const LaunchContext& context, std::byte* device,
                            absl::Span<const std::byte> host) override {
    return Copy(context, device, host.data(), host.size(), cudaMemcpyHostToDevice);
  }
  absl::Status CopyToHost(const LaunchContext& context, absl::Span<std::byte> host,
                          const std::byte* device) override {
    return Copy(context, host.data(), device, host.size(), cudaMemcpyDeviceToHost);
  }
  absl::Status CopyBlocks(const LaunchContext& context, std::byte* cache, int64_t block_stride,
                          absl::Span<const int32_t> src_blocks,
                          absl::Span<const int32_t> dst_blocks) override {
    if (src_blocks.size() != dst_blocks.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("copy of ", src_blocks.size(), " blocks to ", dst_blocks.size()));
    }
    for (size_t i = 0; i < src_blocks.size(); ++i) {
      if (src_blocks[i] < 0 || dst_blocks[i] < 0 || src_blocks[i] == dst_blocks[i]) continue;
      RETURN_IF_ERROR(Copy(context, cache + dst_blocks[i] * block_stride,
                           cache + src_blocks[i] * block_stride, static_cast<size_t>(block_stride),
                           cudaMemcpyDeviceToDevice));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
      absl::Span<const WeightTensor> stacked_rows) override {
    return cuda::PackLinear(stacked_rows);
  }
  absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(
      const WeightTensor& tensor, const HeadSlice& slice) override {
    // Products per head are of bf16, of which the fast ones have no form for fp8.
    if (runtime_->device().bfloat16 && tensor.dtype == DType::kFloat8E4m3) {
      RETURN_IF_ERROR(CheckStored(tensor));
      return cuda::PackHeadLinear(ToBfloat16(tensor).tensor, slice);
    }
    return cuda::PackHeadLinear(tensor, slice);
  }
  absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(
      absl::Span<const ExpertTensors> routed, absl::Span<const ExpertTensors> shared) override {
    return cuda::PackExperts(routed, shared);
  }

  absl::Status Embed(const LaunchContext& context, const EmbedParams& params) override {
    return cuda::Embed(runtime_->On(context), params);
  }
  absl::Status Linear(const LaunchContext& context, const LinearParams& params) override {
    return cuda::Linear(runtime_->On(context), params);
  }
  bool LinearRoundsInput(const PackedLinear& weight, int32_t num_rows) const override {
    return cuda::LinearRoundsInput(runtime_->device(), weight, num_rows);
  }
  int64_t LinearWorkspaceBytes(int32_t max_rows, int64_t max_in_features) const override {
    return cuda::LinearWorkspaceBytes(max_rows, max_in_features);
  }
  absl::Status HeadLinear(const LaunchContext& context, const HeadLinearParams& params) override {
    return cuda::HeadLinear(runtime_->On(context), params);
  }
  absl::Status Rope(const LaunchContext& context, const RopeParams& params) override {
    return cuda::Rope(runtime_->On(context), params);
  }
  absl::Status StoreKv(const LaunchContext& context, const StoreKvParams& params) override {
    return cuda::StoreKv(runtime_->On(context), params);
  }
  absl::Status PrepareAttention(const LaunchContext& context,
                                const PrepareAttentionParams& params) override {
    return cuda::PrepareAttention(runtime_->On(context), params);
  }
  absl::Status GatherKv(const LaunchContext& context, const GatherKvParams& params) override {
    return cuda::GatherKv(runtime_->On(context), params);
  }
  absl::Status Moe(const LaunchContext& context, const MoeParams& params) override {
    return cuda::Moe(runtime_->On(context), params);
  }
  int64_t MoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                            int64_t moe_intermediate_size,
                            int64_t shared_intermediate_size) const override {
    return cuda::MoeWorkspaceBytes(max_rows, gate, hidden_size, moe_intermediate_size,
                                   shared_intermediate_size);
  }
  absl::Status CopyKvEntries(const LaunchContext& context,
                             const CopyKvEntriesParams& params) override {
    return cuda::CopyKvEntries(runtime_->On(context), params);
  }
  absl::Status IndexerLogits(const LaunchContext& context,
                             const IndexerLogitsParams& params) override {
    return cuda::IndexerLogits(runtime_->On(context), params);
  }
  absl::Status TopKSlots(const LaunchContext& context, const TopKSlotsParams& params) override {
    return cuda::TopKSlots(runtime_->On(context), params);
  }
  absl::Status CompressKv(const LaunchContext& context, const CompressKvParams& params) override {
    return cuda::CompressKv(runtime_->On(context), params);
  }
  absl::Status C128AMetadata(const LaunchContext& context,
                             const C128AMetadataParams& params) override {
    return cuda::C128AMetadata(runtime_->On(context), params);
  }
  absl::Status WindowSlots(const LaunchContext& context, const WindowSlotsParams& params) override {
    return cuda::WindowSlots(runtime_->On(context), params);
  }
  absl::Status HyperPre(const LaunchContext& context, const HyperPreParams& params) override {
    return cuda::HyperPre(runtime_->On(context), params);
  }
  absl::Status HyperPost(const LaunchContext& context, const HyperPostParams& params) override {
    return cuda::HyperPost(runtime_->On(context), params);
  }
  absl::Status HeadAndSample(const LaunchContext& context,
                             const HeadAndSampleParams& params) override {
    return cuda::HeadAndSample(runtime_->On(context), params);
  }
  int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size,
                                      int32_t vocab_size) const override {
    return cuda::HeadAndSampleWorkspaceBytes(max_samples, hidden_size, vocab_size);
  }

 private:
  absl::Status Copy(const LaunchContext& context, std::byte* to, const std::byte* from,
                    size_t size_bytes, cudaMemcpyKind kind) {
    if (size_bytes == 0) return absl::OkStatus();
    return ToStatus(cudaMemcpyAsync(to, from, size_bytes, kind, runtime_->On(context).stream),
                    "copying");
  }

  std::unique_ptr<Runtime> runtime_;
  CudaAttention attention_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<Runtime> runtime, Runtime::Open(options));
  return std::make_unique<CudaBackend>(std::move(runtime));
}

}  // namespace kernels::cuda

#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/absorbed_decode.h"
#include "kernels/cpu/c128a_metadata.h"
#include "kernels/cpu/compress_kv.h"
#include "kernels/cpu/embed.h"
#include "kernels/cpu/gather_kv.h"
#include "kernels/cpu/head_and_sample.h"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/hyper_connection.h"
#include "kernels/cpu/indexer.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/moe.h"
#include "kernels/cpu/ragged_mha.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/sparse_decode.h"
#include "kernels/cpu/store_kv.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/window_slots.h"

namespace kernels::cpu {

namespace {

class HostBuffer final : public Buffer {
 public:
  HostBuffer(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  ~HostBuffer() override { std::free(data_); }
  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  std::byte* data_;
  int64_t size_bytes_;
};

class CpuAttention final : public AttentionBackend {
 public:
  explicit CpuAttention(ThreadPool& pool) : pool_(pool) {}

  DType ragged_kv_dtype() const override { return DType::kFloat32; }
  int32_t ragged_piece_tokens() const override { return 512; }
  absl::Status RaggedMha(const LaunchContext&, const RaggedMhaParams& params) override {
    return cpu::RaggedMha(pool_, params);
  }
  absl::Status AbsorbedDecode(const LaunchContext&, const AbsorbedDecodeParams& params) override {
    return cpu::AbsorbedDecode(pool_, params);
  }
  int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                       int32_t num_heads, int32_t kv_lora_rank) const override {
    return cpu::AbsorbedDecodeWorkspaceBytes(max_rows, max_splits_per_seq, num_heads, kv_lora_rank);
  }
  absl::Status SparseDecode(const LaunchContext&, const SparseDecodeParams& params) override {
    return cpu::SparseDecode(pool_, params);
  }
  absl::Status SparsePrefill(const LaunchContext&, const SparseDecodeParams& params) override {
    return cpu::SparseDecode(pool_, params);
  }
  int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t /*max_width*/, int32_t num_heads,
                                     int32_t value_dim) const override {
    return cpu::SparseDecodeWorkspaceBytes(max_rows, num_heads, value_dim);
  }

 private:
  ThreadPool& pool_;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int32_t num_threads) : pool_(num_threads), attention_(pool_) {}

  std::string_view name() const override { return "cpu"; }
  AttentionBackend& attention() override { return attention_; }

  bool uses_host_memory() const override { return true; }
  absl::Status Synchronize(const LaunchContext&) override { return absl::OkStatus(); }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t size_bytes) override {
    if (size_bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("buffer of ", size_bytes, " bytes"));
    }
    const size_t rounded = (static_cast<size_t>(std::max<int64_t>(size_bytes, 1)) + 63) / 64 * 64;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for a buffer of ", size_bytes, " bytes"));
    }
    std::memset(data, 0, rounded);
    return std::make_unique<HostBuffer>(data, size_bytes);
  }

  absl::Status CopyToDevice(const LaunchContext&, std::byte* device,
                            absl::Span<const std::byte> host) override {
    std::copy(host.begin(), host.end(), device);
    return absl::OkStatus();
  }
  absl::Status CopyToHost(const LaunchContext&, absl::Span<std::byte> host,
                          const std::byte* device) override {
    std::copy_n(device, host.size(), host.begin());
    return absl::OkStatus();
  }
  absl::Status CopyBlocks(const LaunchContext&, std::byte* cache, int64_t block_stride,
                          absl::Span<const int32_t> src_blocks,
                          absl::Span<const int32_t> dst_blocks) override {
    if (src_blocks.size() != dst_blocks.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("copy of ", src_blocks.size(), " blocks to ", dst_blocks.size()));
    }
    // In order: a block may be read after an earlier pair wrote it.
    for (size_t i = 0; i < src_blocks.size(); ++i) {
      if (src_blocks[i] < 0 || dst_blocks[i] < 0 || src_blocks[i] == dst_blocks[i]) continue;
      std::memcpy(cache + dst_blocks[i] * block_stride, cache + src_blocks[i] * block_stride,
                  static_cast<size_t>(block_stride));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
      absl::Span<const WeightTensor> stacked_rows) override {
    return cpu::PackLinear(pool_, stacked_rows);
  }
  absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(
      const WeightTensor& tensor, const HeadSlice& slice) override {
    return cpu::PackHeadLinear(pool_, tensor, slice);
  }
  absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(
      absl::Span<const ExpertTensors> routed, absl::Span<const ExpertTensors> shared) override {
    return cpu::PackExperts(pool_, routed, shared);
  }

  absl::Status Embed(const LaunchContext&, const EmbedParams& params) override {
    return cpu::Embed(pool_, params);
  }
  absl::Status Linear(const LaunchContext&, const LinearParams& params) override {
    return cpu::Linear(pool_, params);
  }
  int64_t LinearWorkspaceBytes(int32_t, int64_t) const override { return 0; }
  absl::Status HeadLinear(const LaunchContext&, const HeadLinearParams& params) override {
    return cpu::HeadLinear(pool_, params);
  }
  absl::Status Rope(const LaunchContext&, const RopeParams& params) override {
    return cpu::Rope(pool_, params);
  }
  absl::Status StoreKv(const LaunchContext&, const StoreKvParams& params) override {
    return cpu::StoreKv(pool_, params);
  }
  absl::Status CopyKvEntries(const LaunchContext&, const CopyKvEntriesParams& params) override {
    return cpu::CopyKvEntries(pool_, params);
  }
  absl::Status GatherKv(const LaunchContext&, const GatherKvParams& params) override {
    return cpu::GatherKv(pool_, params);
  }
  absl::Status IndexerLogits(const LaunchContext&, const IndexerLogitsParams& params) override {
    return cpu::IndexerLogits(pool_, params);
  }
  absl::Status TopKSlots(const LaunchContext&, const TopKSlotsParams& params) override {
    return cpu::TopKSlots(pool_, params);
  }
  absl::Status Moe(const LaunchContext&, const MoeParams& params) override {
    return cpu::Moe(pool_, params);
  }
  // Moe works in the thread pool's scratch, which it knows the shared experts' size for.
  int64_t MoeWorkspaceBytes(int32_t, const GateConfig&, int64_t, int64_t, int64_t) const override {
    return 0;
  }
  absl::Status CompressKv(const LaunchContext&, const CompressKvParams& params) override {
    return cpu::CompressKv(pool_, params);
  }
  absl::Status C128AMetadata(const LaunchContext&, const C128AMetadataParams& params) override {
    return cpu::C128AMetadata(pool_, params);
  }
  absl::Status WindowSlots(const LaunchContext&, const WindowSlotsParams& params) override {
    return cpu::WindowSlots(pool_, params);
  }
  absl::Status HyperPre(const LaunchContext&, const HyperPreParams& params) override {
    return cpu::HyperPre(pool_, params);
  }
  absl::Status HyperPost(const LaunchContext&, const HyperPostParams& params) override {
    return cpu::HyperPost(pool_, params);
  }
  absl::Status HeadAndSample(const LaunchContext&, const HeadAndSampleParams& params) override {
    return cpu::HeadAndSample(pool_, params);
  }
  int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size,
                                      int32_t vocab_size) const override {
    return cpu::HeadAndSampleWorkspaceBytes(max_samples, hidden_size, vocab_size);
  }

 private:
  ThreadPool pool_;
  CpuAttention attention_;
};

}  // namespace

std::unique_ptr<Backend> CreateCpuBackend(int32_t num_threads) {
  return std::make_unique<CpuBackend>(num_threads);
}

}  // namespace kernels::cpu

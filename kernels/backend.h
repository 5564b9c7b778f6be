// Backend: every operation for one device.  The CPU form is the obvious composition, the CUDA form
// may fuse whatever it likes behind the same call.  kernels/<op>.h are the contracts.
//
// Rules for all: a launch allocates nothing and synchronises nothing; workspace sizes come from
// maxima only; offsets into caches are int64; an invalid index is -1 or out of range and never
// dereferenced.
//
// Errors: kInvalidArgument for a shape or dtype no kernel supports, kInternal if a launch failed.
// Thread-compatible: the engine's executor thread makes every call after loading.

#ifndef KERNELS_BACKEND_H_
#define KERNELS_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/absorbed_decode.h"
#include "kernels/c128a_metadata.h"
#include "kernels/compress_kv.h"
#include "kernels/head_and_sample.h"
#include "kernels/hyper_connection.h"
#include "kernels/indexer.h"
#include "kernels/linear.h"
#include "kernels/moe.h"
#include "kernels/ragged_mha.h"
#include "kernels/recording.h"
#include "kernels/sparse_decode.h"
#include "kernels/store_kv.h"
#include "kernels/tensor.h"
#include "kernels/window_slots.h"

namespace kernels {

// Device memory (host memory on CPU, 64-byte aligned).  Zeroed when made.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual std::byte* data() = 0;
  virtual int64_t size_bytes() const = 0;
  float* floats() { return reinterpret_cast<float*>(data()); }
};

// The attention of one device and architecture; chosen once at start.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual absl::Status RaggedMha(const LaunchContext& context, const RaggedMhaParams& params) = 0;
  // The dtype of keys and values that suits RaggedMha best; it takes float32 as well.
  virtual DType ragged_kv_dtype() const = 0;
  // How many keys it takes at a time without waste, where keys have to be made for it.
  virtual int32_t ragged_piece_tokens() const = 0;
  virtual absl::Status AbsorbedDecode(const LaunchContext& context,
                                      const AbsorbedDecodeParams& params) = 0;
  // For at most max_rows query rows a call, each of a sequence with at most max_splits_per_seq
  // splits.
  virtual int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                               int32_t num_heads, int32_t kv_lora_rank) const = 0;
  virtual absl::Status SparseDecode(const LaunchContext& context,
                                    const SparseDecodeParams& params) = 0;
  virtual absl::Status SparsePrefill(const LaunchContext& context,
                                     const SparseDecodeParams& params) = 0;
  // For either, at most max_rows query rows a call, each with at most max_width indices.
  virtual int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t max_width, int32_t num_heads,
                                             int32_t value_dim) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;  // "cpu", "cuda"
  virtual AttentionBackend& attention() = 0;

  // Whether operations take pointers to host memory.
  virtual bool uses_host_memory() const = 0;
  // Blocks until everything launched in `context` has run.
  // Errors: kInternal if any of it failed, or met an index or a value that cannot be; the backend
  // is then unusable.
  virtual absl::Status Synchronize(const LaunchContext& context) = 0;

  // Memory.  Copies are launches as well: of host memory that is pinned they may read or write
  // until Synchronize, of other host memory only during the call.  Those beside the launches are
  // kernels/device_copies.h.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t size_bytes) = 0;
  // Pinned host memory, zeroed.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t size_bytes) {
    return Allocate(size_bytes);
  }
  virtual absl::Status CopyToDevice(const LaunchContext& context, std::byte* device,
                                    absl::Span<const std::byte> host) = 0;
  virtual absl::Status CopyToHost(const LaunchContext& context, absl::Span<std::byte> host,
                                  const std::byte* device) = 0;
  // dst block <- src block, whole blocks of the cache.
  virtual absl::Status CopyBlocks(const LaunchContext& context, std::byte* cache,
                                  int64_t block_stride, absl::Span<const int32_t> src_blocks,
                                  absl::Span<const int32_t> dst_blocks) = 0;

  // Steps.  Record calls `launch`, whose launches in the null context are recorded instead of run;
  // null where a replay would gain nothing (`launch` is then not called).
  virtual absl::StatusOr<std::unique_ptr<Recording>> Record(
      absl::FunctionRef<absl::Status()> /*launch*/) {
    return nullptr;
  }
  virtual absl::StatusOr<std::unique_ptr<Timer>> MakeTimer() {
    return std::make_unique<HostTimer>();
  }

  // Loading.  The tensors' memory must outlive the packed objects.
  virtual absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
      absl::Span<const WeightTensor> stacked_rows) = 0;
  virtual absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(
      const WeightTensor& tensor, const HeadSlice& slice) = 0;
  virtual absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(
      absl::Span<const ExpertTensors> routed, absl::Span<const ExpertTensors> shared) = 0;

  // Operations.
  virtual absl::Status Embed(const LaunchContext& context, const EmbedParams& params) = 0;
  virtual absl::Status Linear(const LaunchContext& context, const LinearParams& params) = 0;
  // Whether Linear rounds num_rows rows of float32 input without a norm to bf16 for this weight: it
  // takes them in bf16 as well, and the result is the same.
  virtual bool LinearRoundsInput(const PackedLinear& /*weight*/, int32_t /*num_rows*/) const {
    return false;
  }
  // For at most max_rows rows of at most max_in_features; the workspace is free after the launch.
  virtual int64_t LinearWorkspaceBytes(int32_t max_rows, int64_t max_in_features) const = 0;
  virtual absl::Status HeadLinear(const LaunchContext& context, const HeadLinearParams& params) = 0;
  virtual absl::Status Rope(const LaunchContext& context, const RopeParams& params) = 0;
  virtual absl::Status StoreKv(const LaunchContext& context, const StoreKvParams& params) = 0;
  // Rope, StoreKv and HeadLinear one after the other, unless a backend has them in one.
  virtual absl::Status PrepareAttention(const LaunchContext& context,
                                        const PrepareAttentionParams& params);
  virtual absl::Status CopyKvEntries(const LaunchContext& context,
                                     const CopyKvEntriesParams& params) = 0;
  virtual absl::Status GatherKv(const LaunchContext& context, const GatherKvParams& params) = 0;
  virtual absl::Status IndexerLogits(const LaunchContext& context,
                                     const IndexerLogitsParams& params) = 0;
  virtual absl::Status TopKSlots(const LaunchContext& context, const TopKSlotsParams& params) = 0;
  virtual absl::Status Moe(const LaunchContext& context, const MoeParams& params) = 0;
  // `shared_intermediate_size`: of all shared experts together.
  virtual int64_t MoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                    int64_t moe_intermediate_size,
                                    int64_t shared_intermediate_size) const = 0;
  virtual absl::Status CompressKv(const LaunchContext& context, const CompressKvParams& params) = 0;
  virtual absl::Status C128AMetadata(const LaunchContext& context,
                                     const C128AMetadataParams& params) = 0;
  virtual absl::Status WindowSlots(const LaunchContext& context,
                                   const WindowSlotsParams& params) = 0;
  virtual absl::Status HyperPre(const LaunchContext& context, const HyperPreParams& params) = 0;
  virtual absl::Status HyperPost(const LaunchContext& context, const HyperPostParams& params) = 0;
  virtual absl::Status HeadAndSample(const LaunchContext& context,
                                     const HeadAndSampleParams& params) = 0;
  virtual int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size,
                                              int32_t vocab_size) const = 0;
};

}  // namespace kernels

#endif  // KERNELS_BACKEND_H_

#include "kernels/cuda/store_kv.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/head_stream.cuh"
#include "kernels/cuda/latent_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/new_entry.cuh"
#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/store_entries.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = kStreamThreads;
constexpr int32_t kPieceValues = 8;  // bf16 values of 16 bytes
constexpr int32_t kManyRows = 512;   // that are prepared apart from those that absorb

// A row's norm, rotation and entry; a block's work.  Dynamic shared memory: float32 [rank +
// rope_dim].
__device__ void StoreRow(const StoreKvParams& params, int32_t row, Fault* fault) {
  __shared__ double scratch[33];
  const int64_t slot = params.slots[row];
  WaitForPrevious();
  if (slot < 0) return;
  const int32_t position = params.positions[row];
  if (!HasPosition(params.rope, position)) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  StoreNewEntry(params, row, slot, position, reinterpret_cast<float*>(DynamicShared()), scratch);
}

// The rotation of a row's heads; the work of a block of kBlockThreads.
template <int32_t kBlockThreads>
__device__ void RotateRow(const RopeParams& params, int32_t row, Fault* fault) {
  constexpr int32_t kInFlight = 4;  // pairs of a thread
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  WaitForPrevious();
  if (!HasPosition(rope, position)) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  const int32_t half = rope.rope_dim / 2;
  const int32_t num_pairs = params.num_heads * half;
  for (int32_t begin = threadIdx.x; begin < num_pairs; begin += kInFlight * kBlockThreads) {
    RotatedPair pairs[kInFlight];
#pragma unroll
    for (int32_t j = 0; j < kInFlight; ++j) {
      const int32_t i = begin + j * kBlockThreads;
      if (i >= num_pairs) continue;
      float* head = params.data + row * params.row_stride + i / half * params.head_stride;
      pairs[j] = Rotated(rope, position, 1.0f, i % half, head);
    }
#pragma unroll
    for (int32_t j = 0; j < kInFlight; ++j) {
      if (begin + j * kBlockThreads < num_pairs) pairs[j].Store();
    }
  }
}

struct PrepareArgs {
  StoreKvParams store = {};
  RopeParams rope = {};
  HeadStreamArgs absorb = {};
  Fault* fault = nullptr;
};

// Rows by themselves have small blocks, so that many run at once: they wait for memory.
template <int32_t kAbsorbTiles>
constexpr int32_t kBlockThreads = kAbsorbTiles == 0 ? 64 : kThreads;

// Grid: a block a row to store, then a block a row to rotate, then those that absorb, kAbsorbTiles
// tiles of rows each (0: there are none).
template <int32_t kAbsorbTiles>
__global__ void __launch_bounds__(kBlockThreads<kAbsorbTiles>)
    PrepareKernel(const __grid_constant__ PrepareArgs args) {
  int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < args.store.num_rows) {
    StoreRow(args.store, block, args.fault);
    return;
  }
  block -= args.store.num_rows;
  if (block < args.rope.num_rows) {
    RotateRow<kBlockThreads<kAbsorbTiles>>(args.rope, block, args.fault);
    return;
  }
  if constexpr (kAbsorbTiles > 0) {
    StreamHeadColumns<kAbsorbTiles>(args.absorb, block - args.rope.num_rows);
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) GatherKvKernel(GatherKvParams params) {
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  const int64_t slot = params.slots[row];
  const int32_t rank = params.kv_lora_rank;
  const std::byte* entry = slot < 0 ? nullptr : EntryOfSlot(params.pages, slot);
  for (int32_t i = threadIdx.x; i < rank + params.rope_dim; i += kThreads) {
    const float value =
        entry == nullptr ? 0.0f : LoadEntryValue(entry, params.pages.format, rank, i);
    void* out = i < rank ? params.latent : params.k_rope;
    const int64_t at =
        i < rank ? row * params.latent_row_stride + i : row * params.k_rope_row_stride + i - rank;
    if (params.dtype == DType::kBfloat16) {
      static_cast<uint16_t*>(out)[at] = Bfloat16FromFloat(value);
    } else {
      static_cast<float*>(out)[at] = value;
    }
  }
}

// The same of bf16 entries to bf16 rows, a warp a row, in pieces of 16 bytes.
__global__ void __launch_bounds__(kThreads) CopyKvKernel(GatherKvParams params) {
  const int64_t row = int64_t{blockIdx.x} * kStreamWarps + threadIdx.x / kWarpSize;
  const int64_t slot = row < params.num_rows ? params.slots[row] : -1;
  WaitForPrevious();
  if (row >= params.num_rows) return;
  const int32_t latent_pieces = params.kv_lora_rank / kPieceValues;
  const int32_t pieces = latent_pieces + params.rope_dim / kPieceValues;
  const auto* entry =
      slot < 0 ? nullptr : reinterpret_cast<const uint4*>(EntryOfSlot(params.pages, slot));
  auto* latent = static_cast<uint16_t*>(params.latent) + row * params.latent_row_stride;
  auto* k_rope = static_cast<uint16_t*>(params.k_rope) + row * params.k_rope_row_stride;
#pragma unroll 4
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % kWarpSize; i < pieces; i += kWarpSize) {
    uint16_t* to =
        i < latent_pieces ? latent + kPieceValues * i : k_rope + kPieceValues * (i - latent_pieces);
    *reinterpret_cast<uint4*>(to) = entry == nullptr ? uint4{} : entry[i];
  }
}

bool CanCopyKv(const GatherKvParams& params) {
  const KvPages& pages = params.pages;
  const auto address = reinterpret_cast<uintptr_t>(pages.base) |
                       reinterpret_cast<uintptr_t>(params.latent) |
                       reinterpret_cast<uintptr_t>(params.k_rope);
  const int64_t values =
      params.kv_lora_rank | params.rope_dim | params.latent_row_stride | params.k_rope_row_stride;
  return pages.format == KvFormat::kBfloat16 && params.dtype == DType::kBfloat16 &&
         address % 16 == 0 && (pages.block_stride | pages.entry_bytes) % 16 == 0 &&
         values % kPieceValues == 0;
}

bool IsEntry(const StoreKvParams& params) {
  return params.norm_rope || params.index_key.dim > 0 || !CheckLatentFormat(params.pages).ok();
}

// What a block that stores has in shared memory.
size_t RowBytes(const StoreKvParams& params) {
  return sizeof(float) * static_cast<size_t>(params.kv_lora_rank + params.rope.rope_dim);
}

absl::Status CheckRank(const StoreKvParams& params) {
  if (RowBytes(params) <= kMaxSharedBytes - 1024) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("store_kv: no cuda kernel for a kv_lora_rank of ", params.kv_lora_rank));
}

absl::Status LaunchPrepare(const Launcher& launcher, const char* name, PrepareArgs args) {
  if (args.rope.num_heads == 0 || args.rope.rope.rope_dim == 0) args.rope.num_rows = 0;
  args.fault = launcher.device.fault;
  const int32_t absorbing = args.absorb.num_rows == 0 ? 0 : HeadStreamBlocks(args.absorb);
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(args.store.num_rows + args.rope.num_rows + absorbing)),
      .threads = absorbing == 0 ? kBlockThreads<0> : kThreads,
      .shared_bytes =
          std::max(RowBytes(args.store), absorbing == 0 ? 0 : HeadStreamSharedBytes(args.absorb)),
      .early = true};
  if (absorbing == 0) return Launch(launcher, name, PrepareKernel<0>, shape, args);
  return HeadStreamTiles(args.absorb.num_rows) == kFewHeadStreamTiles
             ? Launch(launcher, name, PrepareKernel<kFewHeadStreamTiles>, shape, args)
             : Launch(launcher, name, PrepareKernel<kManyHeadStreamTiles>, shape, args);
}

}  // namespace

absl::Status CheckLatentFormat(const KvPages& pages) {
  if (pages.format == KvFormat::kFloat32 || pages.format == KvFormat::kBfloat16 ||
      pages.format == KvFormat::kFp8Latent) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError("no cuda kernel yet for this format of cache entries");
}

absl::Status StoreKv(const Launcher& launcher, const StoreKvParams& params) {
  RETURN_IF_ERROR(CheckStoreKv(params));
  if (IsEntry(params)) return StoreEntries(launcher, params);
  RETURN_IF_ERROR(CheckRank(params));
  return LaunchPrepare(launcher, "store_kv", {.store = params});
}

absl::Status Rope(const Launcher& launcher, const RopeParams& params) {
  RETURN_IF_ERROR(CheckRope(params));
  if (params.num_heads == 0 || params.rope.rope_dim == 0) return absl::OkStatus();
  if (params.norm_dim > 0) return NormedRope(launcher, params);
  return LaunchPrepare(launcher, "rope", {.rope = params});
}

absl::Status PrepareAttention(const Launcher& launcher, const PrepareAttentionParams& params) {
  RETURN_IF_ERROR(CheckStoreKv(params.store));
  RETURN_IF_ERROR(CheckRope(params.rope));
  const HeadLinearParams& absorb = params.absorb;
  if (absorb.num_rows > 0) RETURN_IF_ERROR(CheckHeadLinear(absorb));
  const uint16_t* heads = absorb.num_rows > 0 ? Bfloat16Heads(*absorb.weight) : nullptr;
  const bool streams = launcher.device.bfloat16 && heads != nullptr && CanStreamHeads(absorb);
  if (IsEntry(params.store) || params.rope.norm_dim > 0 || (absorb.num_rows > 0 && !streams)) {
    RETURN_IF_ERROR(Rope(launcher, params.rope));
    RETURN_IF_ERROR(StoreKv(launcher, params.store));
    return absorb.num_rows == 0 ? absl::OkStatus() : HeadLinear(launcher, absorb);
  }
  RETURN_IF_ERROR(CheckRank(params.store));
  PrepareArgs args{.store = params.store, .rope = params.rope};
  if (!streams) return LaunchPrepare(launcher, "prepare attention", args);
  if (params.store.num_rows > kManyRows) {
    RETURN_IF_ERROR(LaunchPrepare(launcher, "prepare attention", args));
    return StreamHeadLinear(launcher, absorb, heads);
  }
  args.absorb = MakeHeadStreamArgs(absorb, heads);
  return LaunchPrepare(launcher, "prepare attention", args);
}

absl::Status GatherKv(const Launcher& launcher, const GatherKvParams& params) {
  RETURN_IF_ERROR(CheckGatherKv(params));
  RETURN_IF_ERROR(CheckLatentFormat(params.pages));
  if (CanCopyKv(params)) {
    return Launch(launcher, "gather_kv", CopyKvKernel,
                  {.grid = dim3(static_cast<uint32_t>(CeilDiv(params.num_rows, kStreamWarps))),
                   .threads = kThreads,
                   .early = true},
                  params);
  }
  return Launch(
      launcher, "gather_kv", GatherKvKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params);
}

}  // namespace kernels::cuda

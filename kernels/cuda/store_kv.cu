#include "kernels/cuda/store_kv.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/head_stream.cuh"
#include "kernels/cuda/latent_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/store_entries.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = kStreamThreads;

// Pair i of the rotation: indices of its elements.
__device__ int32_t FirstOfPair(const RopeTable& rope, int32_t i) {
  return rope.layout == RopeLayout::kInterleaved ? 2 * i : i;
}
__device__ int32_t SecondOfPair(const RopeTable& rope, int32_t i) {
  return rope.layout == RopeLayout::kInterleaved ? 2 * i + 1 : i + rope.rope_dim / 2;
}

struct Pair {
  float a;
  float b;
};

// REQUIRES: the position is in the table.
__device__ Pair Rotate(const RopeTable& rope, int32_t position, int32_t i, Pair x) {
  const int64_t at = int64_t{position} * (rope.rope_dim / 2) + i;
  const float cos = rope.cos[at], sin = rope.sin[at];
  return {x.a * cos - x.b * sin, x.b * cos + x.a * sin};
}

__device__ void EncodeValue(KvFormat format, std::byte* entry, int32_t i, float value) {
  if (format == KvFormat::kFloat32) {
    reinterpret_cast<float*>(entry)[i] = value;
  } else {
    StoreBytes16(entry + 2 * i, Bfloat16FromFloat(value));
  }
}

// latent [rank] in shared memory -> e4m3 values and scales; a warp a group.
__device__ void EncodeFloat8(const float* latent, int32_t rank, std::byte* entry) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t groups = CeilDiv(rank, kFloat8GroupSize);
  for (int32_t group = warp; group < groups; group += kThreads / kWarpSize) {
    const int32_t begin = group * kFloat8GroupSize;
    const int32_t end = min(begin + kFloat8GroupSize, rank);
    float amax = 0;
    for (int32_t i = begin + lane; i < end; i += kWarpSize) amax = fmaxf(amax, fabsf(latent[i]));
    for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    }
    const float scale = Float8GroupScale(amax);
    const float inverse = 1.0f / scale;  // a power of two as well: products are exact
    if (lane == 0) StoreBytesFloat(entry + rank + 4 * group, scale);
    for (int32_t i = begin + lane; i < end; i += kWarpSize) {
      entry[i] = static_cast<std::byte>(E4m3FromFloat(latent[i] * inverse));
    }
  }
}

// A row's norm, rotation and entry; a block's work.  Dynamic shared memory: [rank] float32.
__device__ void StoreRow(const StoreKvParams& params, int32_t row, Fault* fault) {
  __shared__ double scratch[33];
  auto* latent = reinterpret_cast<float*>(DynamicShared());
  const int64_t slot = params.slots[row];
  WaitForPrevious();
  if (slot < 0) return;
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  if (rope.rope_dim > 0 && (position < 0 || position >= rope.max_positions)) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  const int32_t rank = params.kv_lora_rank;
  const float* kv_a = params.kv_a + row * params.kv_a_row_stride;
  double sum = 0;
  for (int32_t i = threadIdx.x; i < rank; i += kThreads) {
    sum += static_cast<double>(kv_a[i]) * kv_a[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(rank) + static_cast<double>(params.norm_eps)));
  for (int32_t i = threadIdx.x; i < rank; i += kThreads) {
    latent[i] = kv_a[i] * inverse * params.norm_weight[i];
  }
  __syncthreads();

  const KvFormat format = params.pages.format;
  std::byte* entry = EntryOfSlot(params.pages, slot);
  // Where k_rope's values would start if the whole entry were of their type.
  std::byte* rope_base = entry;
  int32_t rope_begin = rank;
  if (format == KvFormat::kFp8Latent) {
    EncodeFloat8(latent, rank, entry);
    rope_base = entry + rank + 4 * CeilDiv(rank, kFloat8GroupSize);
    rope_begin = 0;
  } else {
    for (int32_t i = threadIdx.x; i < rank; i += kThreads) EncodeValue(format, entry, i, latent[i]);
  }
  for (int32_t i = threadIdx.x; i < rope.rope_dim / 2; i += kThreads) {
    const int32_t first = FirstOfPair(rope, i), second = SecondOfPair(rope, i);
    const Pair rotated = Rotate(rope, position, i, {kv_a[rank + first], kv_a[rank + second]});
    EncodeValue(format, rope_base, rope_begin + first, rotated.a);
    EncodeValue(format, rope_base, rope_begin + second, rotated.b);
  }
}

// The rotation of a row's heads; a block's work.
__device__ void RotateRow(const RopeParams& params, int32_t row, Fault* fault) {
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  WaitForPrevious();
  if (position < 0 || position >= rope.max_positions) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  const int32_t half = rope.rope_dim / 2;
  for (int32_t i = threadIdx.x; i < params.num_heads * half; i += kThreads) {
    float* x = params.data + row * params.row_stride + (i / half) * params.head_stride;
    const int32_t first = FirstOfPair(rope, i % half), second = SecondOfPair(rope, i % half);
    const Pair rotated = Rotate(rope, position, i % half, {x[first], x[second]});
    x[first] = rotated.a;
    x[second] = rotated.b;
  }
}

struct PrepareArgs {
  StoreKvParams store = {};
  RopeParams rope = {};
  HeadStreamArgs absorb = {};
  Fault* fault = nullptr;
};

// Grid: a block a row to store, then a block a row to rotate, then those that absorb, kAbsorbTiles
// tiles of rows each (0: there are none).
template <int32_t kAbsorbTiles>
__global__ void __launch_bounds__(kThreads)
    PrepareKernel(const __grid_constant__ PrepareArgs args) {
  int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < args.store.num_rows) {
    StoreRow(args.store, block, args.fault);
    return;
  }
  block -= args.store.num_rows;
  if (block < args.rope.num_rows) {
    RotateRow(args.rope, block, args.fault);
    return;
  }
  if constexpr (kAbsorbTiles > 0) {
    StreamHeadColumns<kAbsorbTiles>(args.absorb, block - args.rope.num_rows);
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) GatherKvKernel(GatherKvParams params) {
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

bool IsEntry(const StoreKvParams& params) {
  return params.norm_rope || params.index_key.dim > 0 || !CheckLatentFormat(params.pages).ok();
}

absl::Status CheckRank(const StoreKvParams& params) {
  if (sizeof(float) * static_cast<size_t>(params.kv_lora_rank) <= kMaxSharedBytes - 1024) {
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
      .threads = kThreads,
      .shared_bytes = std::max(sizeof(float) * static_cast<size_t>(args.store.kv_lora_rank),
                               absorbing == 0 ? 0 : HeadStreamSharedBytes(args.absorb)),
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
  if (streams) args.absorb = MakeHeadStreamArgs(absorb, heads);
  return LaunchPrepare(launcher, "prepare attention", args);
}

absl::Status GatherKv(const Launcher& launcher, const GatherKvParams& params) {
  RETURN_IF_ERROR(CheckGatherKv(params));
  RETURN_IF_ERROR(CheckLatentFormat(params.pages));
  return Launch(launcher, "gather_kv", GatherKvKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads},
                params);
}

}  // namespace kernels::cuda

#include "kernels/cuda/sparse_latent.h"

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_attention.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_fold.cuh"
#include "kernels/cuda/sparse_gather.cuh"
#include "kernels/cuda/sparse_result.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kMinKeysPerPart = 2 * kSparseKeys;
constexpr int32_t kFoldedParts = 2;  // of a row, by a cluster

// Of a thread.  A block starts with 168 for each of its three warpgroups' threads, and divides
// them: a lane that widens a step's keys for one block has twice as many of them on their way.
template <KvFormat kFormat, int32_t kBlocks>
constexpr int32_t kGatherRegisters = kFormat == KvFormat::kBfloat16 ? 72
                                     : kBlocks > 1                  ? 88
                                                                    : 104;
template <KvFormat kFormat, int32_t kBlocks>
constexpr int32_t kAttendRegisters = (3 * 168 - kGatherRegisters<kFormat, kBlocks>) / 2;

// The block's dynamic shared memory.  Nothing else stands before it, so it begins where a box may:
// an address that is known, and occupies no registers.
__device__ inline std::byte* SharedBoxes() {
  extern __shared__ __align__(kBoxAlignment) std::byte shared_boxes[];
  return shared_boxes;
}

// Grid: tiles of heads, parts of a row, rows.  A cluster is kBlocks neighbouring tiles, which share
// the gathering of their row's keys, or all parts of a row if it folds them.
template <KvFormat kFormat, int32_t kBoxes, int32_t kBlocks>
__global__ void __launch_bounds__(kSparseThreads, 1)
    SparseLatentKernel(const __grid_constant__ SparseArgs args) {
  auto& shared = *reinterpret_cast<SparseShared<kBoxes>*>(SharedBoxes());
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < kSparseStages; ++s) {
      InitBarrier(&shared.full[s], kGatherArrivals<kFormat>);
      InitBarrier(&shared.empty[s], kBlocks * kSparseProductWarps);
    }
    PublishBarriers();
  }
  if constexpr (kBlocks > 1) {
    ClusterBarrier();
  } else {
    __syncthreads();
  }
  const SparseDecodeParams& params = args.params;
  const int32_t first_head = static_cast<int32_t>(blockIdx.x) * kSparseHeads;
  const int32_t num_heads = min(kSparseHeads, params.num_heads - first_head);
  const int32_t row = static_cast<int32_t>(blockIdx.z);
  const auto part_of = [&] {
    return SparsePartOf(shared.entries.count, static_cast<int32_t>(blockIdx.y),
                        static_cast<int32_t>(gridDim.y));
  };
  WaitForPrevious();
  if (threadIdx.x >= 2 * kWarpgroupThreads) {
    FindEntries(shared, args, row);
    PassEntries();
    GiveRegisters<kGatherRegisters<kFormat, kBlocks>>();
    const SparsePart part = part_of();
    if (part.begin < part.end) GatherKeys<kFormat, kBlocks>(shared, args, part);
    if (args.folds) ClusterBarrier();
    if (kBlocks > 1 || args.folds) ClusterBarrier();
    return;
  }
  // Rows of few entries (V4's) are sooner done if their queries are sent for after the first keys:
  // 2 %; others lose as much.
  constexpr bool kEntriesFirst = kFormat == KvFormat::kFp8SharedKv;
  if (kEntriesFirst) WaitForEntries();
  LoadQueries(shared, params, row, first_head);
  if (!kEntriesFirst) WaitForEntries();
  const SparsePart part = part_of();
  TakeRegisters<kAttendRegisters<kFormat, kBlocks>>();
  const SparsePartResult result = PartResult(shared);
  const auto attend = [&]<int32_t kGroup>() {
    SparseAttention<kFormat, kBoxes, kBlocks, kGroup> attention(shared, params.softmax_scale,
                                                                part.end - part.begin);
    attention.AttendKeys();
    const SparseTarget target = TargetOf(args, row, first_head);
    float lse[2];
    attention.Divide(params.softmax_scale, args.folds ? nullptr : target.sink, num_heads, lse);
    if (kGroup == 1 && target.rotate_back && !args.folds) {
      attention.RotateValuesBack(params.inverse_rope, params.positions[row]);
    }
    attention.Leave(result, lse);
    if (args.folds) return;
    Sync(kBothGroups);
    StorePart(result, num_heads, target);
  };
  if (part.begin < part.end) {
    if (threadIdx.x < kWarpgroupThreads) {
      attend.template operator()<0>();
    } else {
      attend.template operator()<1>();
    }
  } else if (!args.folds) {
    StoreNothing(TargetOf(args, row, first_head), num_heads);
  } else if (threadIdx.x < kSparseHeads) {
    result.lse[threadIdx.x] = -INFINITY;
  }
  if (args.folds) {
    ClusterBarrier();
    FoldParts(result, args, row, num_heads, TargetOf(args, row, first_head));
  }
  // Nobody leaves while others may still read or write here.
  if (kBlocks > 1 || args.folds) ClusterBarrier();
}

// In clusters of that many blocks and parts, which Launch (launch.cuh) does not know.
absl::Status LaunchInClusters(const Launcher& launcher, void (*kernel)(SparseArgs), dim3 grid,
                              dim3 cluster, size_t shared_bytes, const SparseArgs& args) {
  constexpr char kName[] = "sparse_decode";
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return ToStatus(error, kName);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kSparseThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launcher.stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return ToStatus(cudaLaunchKernelEx(&config, kernel, args), kName);
}

template <KvFormat kFormat, int32_t kBoxes, int32_t kBlocks>
absl::Status RunParts(const Launcher& launcher, SparseArgs args, int32_t num_parts) {
  if (args.params.num_rows == 0 || args.params.num_heads == 0) return absl::OkStatus();
  args.folds = num_parts == kFoldedParts && kBlocks == 1;
  const dim3 grid(static_cast<uint32_t>(CeilDiv(args.params.num_heads, kSparseHeads)),
                  static_cast<uint32_t>(num_parts), static_cast<uint32_t>(args.params.num_rows));
  RETURN_IF_ERROR(LaunchInClusters(launcher, SparseLatentKernel<kFormat, kBoxes, kBlocks>, grid,
                                   dim3(kBlocks, args.folds ? kFoldedParts : 1),
                                   sizeof(SparseShared<kBoxes>), args));
  if (num_parts == 1 || args.folds) return absl::OkStatus();
  return CombineSparseParts(launcher, args, num_parts);
}

absl::Status RunFormat(const Launcher& launcher, const SparseArgs& args, int32_t num_parts) {
  const KvFormat format = args.params.sources[0].pages.format;
  const bool in_pairs = CeilDiv(args.params.num_heads, kSparseHeads) % 2 == 0;
  if (format == KvFormat::kFp8Latent) {
    return in_pairs ? RunParts<KvFormat::kFp8Latent, kLatentBoxes, 2>(launcher, args, num_parts)
                    : RunParts<KvFormat::kFp8Latent, kLatentBoxes, 1>(launcher, args, num_parts);
  }
  if (format == KvFormat::kFp8SharedKv) {
    return in_pairs
               ? RunParts<KvFormat::kFp8SharedKv, kSharedKvBoxes, 2>(launcher, args, num_parts)
               : RunParts<KvFormat::kFp8SharedKv, kSharedKvBoxes, 1>(launcher, args, num_parts);
  }
  return args.params.dim == kSparseValueDim
             ? RunParts<KvFormat::kBfloat16, kLatentBoxes, 1>(launcher, args, num_parts)
             : RunParts<KvFormat::kBfloat16, kSharedKvBoxes, 1>(launcher, args, num_parts);
}

// Whether this source's entries can be read 16 bytes at a time; `format` is the first one's.
bool CanGather(const SparseSource& source, KvFormat format) {
  const KvPages& pages = source.pages;
  return source.indices == nullptr ||
         (pages.format == format && pages.block_stride % 16 == 0 &&
          reinterpret_cast<uintptr_t>(pages.base) % 16 == 0 &&
          (format == KvFormat::kFp8SharedKv || pages.entry_bytes % 16 == 0));
}

}  // namespace

bool CanRunSparseLatent(const SparseDecodeParams& params) {
  const auto aligned = [](const float* pointer, int64_t row_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row_stride % 4 == 0 &&
           head_stride % 4 == 0;
  };
  const KvFormat format = params.sources[0].pages.format;
  const bool is_latent = params.dim == kSparseValueDim &&
                         (format == KvFormat::kFp8Latent || format == KvFormat::kBfloat16);
  const bool is_shared_kv = params.dim == kSparseValueDim - kSparseRope &&
                            (format == KvFormat::kFp8SharedKv || format == KvFormat::kBfloat16);
  const RopeTable& rope = params.inverse_rope;
  return (is_latent || is_shared_kv) && params.rope_dim == kSparseRope &&
         params.value_dim == kSparseValueDim && params.softmax_scale > 0 &&
         params.sources[0].indices != nullptr && CanGather(params.sources[0], format) &&
         CanGather(params.sources[1], format) &&
         (rope.rope_dim == 0 ||
          (rope.rope_dim == kSparseRope && rope.layout == RopeLayout::kInterleaved)) &&
         aligned(params.q, params.q_row_stride, params.q_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride) &&
         aligned(params.out, params.out_row_stride, params.out_head_stride);
}

absl::Status SparseLatent(const Launcher& launcher, const SparseDecodeParams& params,
                          const SparseList& list, const SparseParts& parts, float* values,
                          int64_t row_stride, int64_t head_stride) {
  const SparseArgs args{params, list,       parts,       /*folds=*/false,
                        values, row_stride, head_stride, launcher.device.fault};
  const int32_t tiles = CeilDiv(params.num_heads, kSparseHeads) * params.num_rows;
  const int32_t num_parts = std::max(
      1, std::min(kMaxSparseParts / tiles, static_cast<int32_t>(list.stride) / kMinKeysPerPart));
  return RunFormat(launcher, args, num_parts);
}

}  // namespace kernels::cuda

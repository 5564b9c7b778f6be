#include "kernels/cuda/latent_decode.h"

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/latent_attention.cuh"
#include "kernels/cuda/latent_line.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kMaxBlocks = 256;
constexpr int32_t kMaxHeads = 1024;
constexpr int32_t kMinBoxRows = 8;
constexpr size_t kBoxAlignment = 1024;  // bytes

// Brings the keys of a walk, tile by tile; a warp's work, a lane of which has a box of keys.
template <typename S>
__device__ void CopyKeys(LatentShared<S>& shared, const LatentArgs& args,
                         LineWalk<S::kVectors> walk) {
  const AbsorbedDecodeParams& params = args.params;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t first_key = lane * args.box_rows;  // of the tile
  const bool has_box = first_key < kLatentTileKeys;
  constexpr uint32_t kChunkBytes = kChunkBoxes * kBoxElements * sizeof(uint16_t);
  bool waited = false;
  RingPosition<S::kChunks> at;
  for (; !walk.done(); walk.Advance()) {
    // Of the keys only this step's were written by a kernel that may still run.
    const int32_t num_old = walk.kv_len() - walk.q_len();
    for (int32_t tile = walk.tile_begin(); tile < walk.tile_end(); ++tile) {
      if (!waited && (tile + 1) * kLatentTileKeys > num_old) {
        WaitForPrevious();
        waited = true;
      }
      // Keys without a block, or past the end, are out of the map's bounds: zeros.
      const int32_t key = tile * kLatentTileKeys + first_key;
      const bool exists = has_box && key < walk.kv_len();
      const int32_t index = key / params.pages.block_size;
      const int32_t block = exists && index < params.block_table_stride
                                ? params.block_table[walk.seq() * params.block_table_stride + index]
                                : -1;
      for (int32_t chunk = 0; chunk < kTileChunks; ++chunk, at.Advance()) {
        Barrier* full = &shared.full[at.stage];
        WaitFor(&shared.empty[at.stage], at.parity ^ 1);
        if (lane == 0) ArriveAndExpect(full, kChunkBytes);
        __syncwarp();
        if (!has_box) continue;
        for (int32_t box = 0; box < kChunkBoxes; ++box) {
          CopyBox(shared.keys[at.stage][box] + first_key * kBoxColumns, &args.keys, full,
                  (chunk * kChunkBoxes + box) * kBoxColumns, key % params.pages.block_size, block,
                  kEvictFirst);
        }
      }
      if (exists && block < 0) NoteFault(args.fault, FaultKind::kNoBlock, walk.seq(), key);
    }
  }
  if (!waited) WaitForPrevious();
}

template <typename S>
__device__ void SyncMultipliers() {
  asm volatile("bar.sync %0, %1;" : : "n"(S::kGroups + 1), "n"(S::kMultipliers) : "memory");
}

// Grid: the multiprocessors, or as many of them as share evenly in the lines.
template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    LatentDecodeKernel(const __grid_constant__ LatentArgs args) {
  std::byte* dynamic = DynamicShared();
  auto& shared = *reinterpret_cast<LatentShared<S>*>(
      dynamic + (kBoxAlignment - SharedAddress(dynamic) % kBoxAlignment) % kBoxAlignment);
  if (threadIdx.x == 0) {
    PrefetchMap(&args.keys);
    for (int32_t chunk = 0; chunk < S::kChunks; ++chunk) {
      InitBarrier(&shared.full[chunk], 1);
      InitBarrier(&shared.empty[chunk], S::kMultipliers / kWarpSize);
    }
    PublishBarriers();
  }
  const AbsorbedDecodeParams& params = args.params;
  const int32_t num_lines = args.num_lines;
  CountTiles<S::kVectors>(params, num_lines, shared.tiles_before);
  const int32_t num_tiles = shared.tiles_before[params.num_seqs];
  const int32_t blocks = static_cast<int32_t>(gridDim.x) / num_lines;  // of a line
  const int32_t per_block = max(CeilDiv(num_tiles, blocks), 1);
  const int32_t begin = static_cast<int32_t>(blockIdx.x) / num_lines * per_block;
  LineWalk<S::kVectors> walk(params, num_lines, static_cast<int32_t>(blockIdx.x) % num_lines,
                             shared.tiles_before, begin, min(begin + per_block, num_tiles));
  if (threadIdx.x >= S::kMultipliers) {
    if (S::kGroups > 1) GiveRegisters<40>();
    if (threadIdx.x < S::kMultipliers + kWarpSize) {
      CopyKeys(shared, args, walk);
    } else {
      WaitForPrevious();
    }
  } else {
    if (S::kGroups > 1) TakeRegisters<232>();
    WaitForPrevious();
    WritePlaces<S::kVectors>(params, num_lines, shared.tiles_before, per_block, S::kMultipliers,
                             args.partials.places);
    SyncMultipliers<S>();  // nobody needs tiles_before any more
    LatentAttention<S> attention(shared, args);
    for (; !walk.done(); walk.Advance()) {
      attention.Begin(walk);
      for (int32_t tile = walk.tile_begin(); tile < walk.tile_end(); ++tile) {
        attention.AttendTile(tile);
      }
      attention.Store(walk);
    }
  }
}

// Vectors of a tile: so that the heads of one row fit, if they do.
int32_t TileVectors(int64_t num_heads) { return num_heads <= 16 ? 16 : num_heads <= 32 ? 32 : 64; }

int64_t LayOut(std::byte* base, int64_t rows, int64_t heads, int64_t blocks,
               LatentPartials& partials) {
  const int64_t vectors = TileVectors(heads);
  // As PartialNumber gives them: whole tiles, the rounding, a block's share.
  const int64_t places =
      (rows * heads / vectors + (HasWholeTiles(heads, vectors) ? 0 : rows) + 1 + blocks) * vectors;
  ScratchCarver carver(base);
  carver.Take(partials.out, places * kLatentRank);
  carver.Take(partials.lse, places);
  carver.Take(partials.places, rows * heads);
  return carver.size();
}

// The pages as a stack of matrices, a block each.  How many there are is the table's to know.
MatrixShape ShapeOfPages(const KvPages& pages) {
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(uint16_t));
  return {.data = pages.base,
          .rows = pages.block_size,
          .columns = kLatentKeyDim,
          .row_stride = pages.entry_bytes / kElementBytes,
          .count = INT32_MAX,
          .stack_stride = pages.block_stride / kElementBytes};
}
int32_t BoxRows(const KvPages& pages) { return std::min(pages.block_size, kLatentTileKeys); }

template <typename S>
absl::Status LaunchAttention(const Launcher& launcher, int32_t blocks, const LatentArgs& args) {
  blocks -= blocks % args.num_lines;
  static_assert(sizeof(LatentShared<S>) + kBoxAlignment <= kMaxSharedBytes);
  return Launch(launcher, "latent decode", LatentDecodeKernel<S>,
                {.grid = dim3(static_cast<uint32_t>(blocks)),
                 .threads = S::kThreads,
                 .shared_bytes = sizeof(LatentShared<S>) + kBoxAlignment,
                 .early = true},
                args);
}

}  // namespace

bool CanRunLatentDecode(const AbsorbedDecodeParams& params) {
  const KvPages& pages = params.pages;
  const int32_t box_rows = BoxRows(pages);
  const auto aligned = [](const float* data, int64_t row_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % 4 == 0 &&
           head_stride % 4 == 0;
  };
  return params.kv_lora_rank == kLatentRank && params.qk_rope_head_dim == kLatentRope &&
         params.num_heads <= kMaxHeads && params.num_seqs <= kMaxLatentSeqs &&
         pages.format == KvFormat::kBfloat16 && pages.entry_bytes % 16 == 0 &&
         pages.block_stride % 16 == 0 && box_rows >= kMinBoxRows &&
         kLatentTileKeys % box_rows == 0 && pages.block_size % box_rows == 0 &&
         CanMap(ShapeOfPages(pages)) &&
         aligned(params.q_latent, params.q_latent_row_stride, params.q_latent_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride);
}

int64_t LatentDecodeWorkspaceBytes(int32_t max_rows, int32_t num_heads) {
  LatentPartials partials;
  return LayOut(nullptr, max_rows, num_heads, kMaxBlocks, partials);
}

absl::Status LatentDecode(const Launcher& launcher, const AbsorbedDecodeParams& params) {
  const int32_t blocks = std::min(launcher.device.num_sms, kMaxBlocks);
  const int32_t box_rows = BoxRows(params.pages);
  LatentArgs args{
      .box_rows = box_rows, .params = params, .partials = {}, .fault = launcher.device.fault};
  ASSIGN_OR_RETURN(args.keys, MakeTensorMap(ShapeOfPages(params.pages),
                                            {.rows = box_rows, .fetch_neighbours = false}));
  LayOut(params.workspace, params.num_rows, params.num_heads, blocks, args.partials);
  const int32_t vectors = TileVectors(params.num_heads);
  args.num_lines = NumLines(params.num_heads, vectors);
  args.partials.step = vectors * args.num_lines;
  switch (vectors) {
    case 16:
      RETURN_IF_ERROR((LaunchAttention<LatentShape<1, 16>>(launcher, blocks, args)));
      break;
    case 32:
      RETURN_IF_ERROR((LaunchAttention<LatentShape<1, 32>>(launcher, blocks, args)));
      break;
    default:
      RETURN_IF_ERROR((LaunchAttention<LatentShape<2, 32>>(launcher, blocks, args)));
  }
  return CombineLatents(launcher, params, args.partials);
}

}  // namespace kernels::cuda

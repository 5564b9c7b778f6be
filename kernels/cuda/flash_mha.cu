#include "kernels/cuda/flash_mha.h"

#include <algorithm>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/flash_feed.cuh"
#include "kernels/cuda/flash_softmax.cuh"
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kFlashThreads = 3 * kWarpgroupThreads;  // the third warpgroup feeds the others
constexpr int32_t kQueryProducts = (kFlashNope + kFlashRope) / kProductDepth;
constexpr size_t kBoxAlignment = 1024;  // bytes
constexpr float kLog2E = 1.44269504f;

// The thread's number, asked for where it is used: registers are few.
__device__ int32_t ThisThread() {
  int32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ void SyncWarpgroup(int32_t warpgroup) {
  asm volatile("bar.sync %0, %1;" : : "r"(warpgroup + 1), "n"(kWarpgroupThreads) : "memory");
}

// The warpgroups issue their products in turns, so that one's run while the other weighs scores.
__device__ void TakeTurn(int32_t warpgroup) {
  asm volatile("bar.sync %0, %1;" : : "r"(warpgroup + 3), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ void PassTurn(int32_t warpgroup) {
  asm volatile("bar.arrive %0, %1;"
               :
               : "r"((warpgroup ^ 1) + 3), "n"(2 * kWarpgroupThreads)
               : "memory");
}

// The warpgroup's next 64 query rows, rounded, as the left operand of products.
__device__ void TakeQueries(FlashShared& shared, int32_t warpgroup, uint32_t parity,
                            uint32_t (&queries)[kQueryProducts][4]) {
  const int32_t warp = ThisThread() / kWarpSize % 4;
  const int32_t lane = ThisThread() % kWarpSize;
  WaitFor(&shared.full_q[warpgroup], parity);
  const float* row = shared.q[16 * warp + lane / 4];
#pragma unroll
  for (int32_t k = 0; k < kQueryProducts; ++k) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t chunk = RotateChunk(4 * k + i / 2 * 2 + lane % 4 / 2, lane / 4);
      const auto pair = *reinterpret_cast<const float2*>(row + i % 2 * 8 * kQueryPitch +
                                                         chunk * kChunkValues + lane % 2 * 2);
      queries[k][i] = PackBfloat16(pair.x, pair.y);
    }
  }
  __syncwarp();
  if (lane == 0) Arrive(&shared.empty_q);
}

// The same of the block's first tile, straight from where they are.
__device__ void LoadQueries(const RaggedMhaParams& params, const FlashTile& tile, int32_t warpgroup,
                            uint32_t (&queries)[kQueryProducts][4]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize % 4;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const float *nope[2], *rope[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t row_of_tile = warpgroup * kProductRows + 16 * warp + lane / 4 + 8 * i;
    const int64_t row = tile.q_begin + min(row_of_tile, tile.num_rows - 1);
    nope[i] = params.q_nope + row * params.q_nope_row_stride +
              tile.head * params.q_nope_head_stride + 2 * (lane % 4);
    rope[i] = params.q_rope + row * params.q_rope_row_stride +
              tile.head * params.q_rope_head_stride + 2 * (lane % 4);
  }
#pragma unroll
  for (int32_t k = 0; k < kQueryProducts; ++k) {
    const int32_t d = k * kProductDepth;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float* from = d < kFlashNope ? nope[i % 2] + d : rope[i % 2] + d - kFlashNope;
      const auto pair = *reinterpret_cast<const float2*>(from + i / 2 * 8);
      queries[k][i] = PackBfloat16(pair.x, pair.y);
    }
  }
}

// Values of keys [count, kFlashKeys) become zeros for this warpgroup's products.
__device__ void ClearValues(uint16_t (&v)[kValueBoxes][kBlockElements], int32_t count,
                            int32_t warpgroup) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  for (int32_t box = 0; box < kValueBoxes; ++box) {
    for (int32_t i = count * kBoxColumns + 8 * thread; i < kBlockElements;
         i += 8 * kWarpgroupThreads) {
      *reinterpret_cast<uint4*>(v[box] + i) = make_uint4(0, 0, 0, 0);
    }
  }
  PublishShared();
  SyncWarpgroup(warpgroup);
}

__device__ void BeginScores(const FlashShared& shared, int32_t stage,
                            const uint32_t (&queries)[kQueryProducts][4],
                            float (&scores)[kProductSums]) {
  const uint64_t keys = DescribeRows(shared.k[stage]);
  KeepSums(scores);
  BeginProducts();
#pragma unroll
  for (int32_t k = 0; k < kQueryProducts; ++k) {
    const int32_t d = k * kProductDepth;
    const int32_t at = d / kBoxColumns * kBlockElements + d % kBoxColumns;
    MultiplyRows(scores, queries[k], Further(keys, at), k > 0);
  }
  CommitProducts();
}

__device__ void BeginValues(const FlashShared& shared, int32_t stage,
                            const uint32_t (&weights)[kKeyProducts][4],
                            float (&out)[kProductSums]) {
  const uint64_t values = DescribeColumns(shared.v[stage][0], kBlockElements * sizeof(uint16_t));
  KeepSums(out);
  BeginProducts();
#pragma unroll
  for (int32_t k = 0; k < kKeyProducts; ++k) {
    MultiplyColumns(out, weights[k], Further(values, k * kProductDepth * kBoxColumns));
  }
  CommitProducts();
}

__device__ void StorePair(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
__device__ void StorePair(uint16_t* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = PackBfloat16(low, high);
}

// Stores the first `num_rows` of the warp's rows times `scale`, as they are or rounded, through
// shared memory, so that whole lines are written.  `to`: the warp's first row.
template <typename T>
__device__ void StoreLines(const float (&out)[kProductSums], const float (&scale)[2],
                           int32_t num_rows, T* to, int64_t row_stride,
                           uint4 (&staged)[kStagedRows][kStagedChunks]) {
  constexpr int32_t kChunk = sizeof(uint4) / sizeof(T);
  constexpr int32_t kColumns = kStagedChunks * kChunk;  // that are staged at a time
  constexpr int32_t kRowsAtATime = kWarpSize / kStagedChunks;
  constexpr int32_t kPasses = kStagedRows / kRowsAtATime;
  static_assert(RotateChunk(0, kRowsAtATime) == 0);
  const int32_t lane = ThisThread() % kWarpSize;
  const int32_t row = lane / kStagedChunks, chunk = lane % kStagedChunks;
  const uint4* from = &staged[row][RotateChunk(chunk, row)];
  uint4* line[kPasses];
#pragma unroll
  for (int32_t pass = 0; pass < kPasses; ++pass) {
    line[pass] = reinterpret_cast<uint4*>(to + (row + pass * kRowsAtATime) * row_stride) + chunk;
  }
  T* pairs[kColumns / 8];  // of the thread's first row
#pragma unroll
  for (int32_t j = 0; j < kColumns / 8; ++j) {
    const int32_t column = 8 * j + 2 * (lane % 4);
    pairs[j] = reinterpret_cast<T*>(&staged[lane / 4][RotateChunk(column / kChunk, lane / 4)]) +
               column % kChunk;
  }
#pragma unroll
  for (int32_t column = 0; column < kFlashValue; column += kColumns) {
    __syncwarp();
#pragma unroll
    for (int32_t j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t at = 4 * (column / 8 + j) + 2 * i;
        StorePair(pairs[j] + i * 8 * kColumns, out[at] * scale[i], out[at + 1] * scale[i]);
      }
    }
    __syncwarp();
    uint4 values[kPasses];
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      values[pass] = from[pass * kRowsAtATime * kStagedChunks];
    }
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      if (row + pass * kRowsAtATime < num_rows) line[pass][column / kChunk] = values[pass];
    }
  }
}

// Stores the thread's row times `scale`, or adds it to `keep` times what is there.
__device__ void MergeRow(const float (&out)[kProductSums], int32_t row_in_thread, float scale,
                         float keep, float* to) {
#pragma unroll
  for (int32_t j = 0; j < kFlashValue / 8; ++j) {
    auto* pair = reinterpret_cast<float2*>(to + 8 * j);
    const int32_t at = 4 * j + 2 * row_in_thread;
    float2 value = make_float2(out[at] * scale, out[at + 1] * scale);
    if (keep != 0) {
      const float2 old = *pair;
      value = make_float2(fmaf(keep, old.x, value.x), fmaf(keep, old.y, value.y));
    }
    *pair = value;
  }
}

// Stores the warp's rows, or merges them with what is there.
__device__ void StoreRows(const RaggedMhaParams& params, const FlashTile& tile,
                          const RowState& state, const float (&out)[kProductSums],
                          uint4 (&staged)[kStagedRows][kStagedChunks]) {
  const int32_t lane = ThisThread() % kWarpSize;
  const int32_t warp_row = ThisThread() / kWarpSize * kStagedRows;
  const int64_t first_row = int64_t{tile.q_begin} + warp_row;
  const int32_t num_rows = tile.num_rows - warp_row;
  const int64_t first = first_row * params.out_row_stride + tile.head * params.out_head_stride;
  float* lse =
      params.lse == nullptr ? nullptr : params.lse + tile.head * params.lse_stride + first_row;
  float scale[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const int32_t row = lane / 4 + 8 * i;
    const bool blind = sum == 0;
    scale[i] = blind ? 0.0f : 1.0f / sum;
    if (lse == nullptr) continue;
    float new_lse = blind ? -INFINITY : fmaf(state.max[i], params.softmax_scale, logf(sum));
    if (params.accumulate) {
      const float old_lse = row < num_rows ? lse[row] : -INFINITY;
      __syncwarp();  // all of a row's lanes have read the old lse
      if (row >= num_rows || blind) continue;
      float keep = 0;
      if (old_lse != -INFINITY) {
        const MergeWeights weights = WeighByLse(new_lse, old_lse);
        scale[i] *= weights.part;
        keep = weights.other;
        new_lse = weights.lse;
      }
      MergeRow(out, i, scale[i], keep,
               params.out + first + row * params.out_row_stride + lane % 4 * 2);
    }
    if (lane % 4 == 0 && row < num_rows) lse[row] = new_lse;
  }
  if (params.rounded_out != nullptr) {
    StoreLines(out, scale, num_rows, params.rounded_out + first, params.out_row_stride, staged);
  } else if (!params.accumulate) {
    StoreLines(out, scale, num_rows, params.out + first, params.out_row_stride, staged);
  }
}

// A multiplying warpgroup's work: its rows of every tile of the block.
__device__ void AttendTiles(FlashShared& shared, const RaggedMhaParams& params) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t warpgroup = static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const auto arrive = [&](Barrier* barrier) {
    __syncwarp();
    if (lane == 0) Arrive(barrier);
  };
  RingPosition<kStages> k_at, v_at;
  RingPosition<kTilePlaces> tile_at;
  uint32_t queries[kQueryProducts][4] = {};
  uint32_t query_parity = 0;
  float scores[kProductSums];
  if (warpgroup == 1) PassTurn(warpgroup);  // the first warpgroup begins
  WaitFor(&shared.full_tile[0], 0);
  bool has_tile = shared.tiles[0].seq >= 0;
  if (has_tile) {
    LoadQueries(params, shared.tiles[0], warpgroup, queries);
    WaitFor(&shared.full_k[0], 0);
  }
  TakeTurn(warpgroup);
  BeginScores(shared, 0, queries, scores);
  PassTurn(warpgroup);
  for (; has_tile; tile_at.Advance()) {
    const FlashTile& tile = shared.tiles[tile_at.stage];
    const int32_t num_steps = tile.num_steps;
    int32_t offset = tile.offset, left = tile.kv_len;  // from the step's first key on
    RowState state;
    float out[kProductSums] = {};
    float shrink[2];
    uint32_t weights[kKeyProducts][4];
    WaitForProducts<0>();
    KeepSums(scores);
    arrive(&shared.empty_k[k_at.stage]);
    k_at.Advance();
    Mask(scores, offset, left);
    RaiseMax(scores, scale_log2, state, shrink);
    Weigh(scores, scale_log2, shrink, state, weights, out);
    // The products of this step's scores run beside those of the last step's values.
    for (int32_t step = 1; step < num_steps; ++step, k_at.Advance(), v_at.Advance()) {
      offset -= kFlashKeys;
      left -= kFlashKeys;
      WaitFor(&shared.full_k[k_at.stage], k_at.parity);
      TakeTurn(warpgroup);
      BeginScores(shared, k_at.stage, queries, scores);
      WaitFor(&shared.full_v[v_at.stage], v_at.parity);
      BeginValues(shared, v_at.stage, weights, out);
      PassTurn(warpgroup);
      WaitForProducts<1>();
      KeepSums(scores);
      arrive(&shared.empty_k[k_at.stage]);
      Mask(scores, offset, left);
      RaiseMax(scores, scale_log2, state, shrink);
      WaitForProducts<0>();
      KeepSums(out);
      arrive(&shared.empty_v[v_at.stage]);
      Weigh(scores, scale_log2, shrink, state, weights, out);
    }
    WaitFor(&shared.full_v[v_at.stage], v_at.parity);
    if (left < kFlashKeys) ClearValues(shared.v[v_at.stage], left, warpgroup);
    BeginValues(shared, v_at.stage, weights, out);
    // The next tile's first products run while this one's rows are stored.
    RingPosition<kTilePlaces> next_at = tile_at;
    next_at.Advance();
    WaitFor(&shared.full_tile[next_at.stage], next_at.parity);
    has_tile = shared.tiles[next_at.stage].seq >= 0;
    if (has_tile) {
      TakeQueries(shared, warpgroup, query_parity, queries);
      query_parity ^= 1;
      WaitFor(&shared.full_k[k_at.stage], k_at.parity);
    }
    TakeTurn(warpgroup);
    BeginScores(shared, k_at.stage, queries, scores);
    PassTurn(warpgroup);
    WaitForProducts<1>();
    KeepSums(out);
    arrive(&shared.empty_v[v_at.stage]);
    v_at.Advance();
    StoreRows(params, tile, state, out, shared.staged[ThisThread() / kWarpSize]);
    arrive(&shared.empty_tile[tile_at.stage]);
  }
  WaitForProducts<0>();  // of a tile that there is not
  KeepSums(scores);
  if (warpgroup == 0) TakeTurn(warpgroup);  // the last one that was passed
}

// Blocks that take one tile after the other.
__global__ void __launch_bounds__(kFlashThreads, 1)
    FlashMhaKernel(const __grid_constant__ FlashArgs args) {
  // Not through an integer, or accesses would not be known to be to shared memory.
  std::byte* const dynamic = DynamicShared();
  auto& shared = *reinterpret_cast<FlashShared*>(
      dynamic + (kBoxAlignment - SharedAddress(dynamic) % kBoxAlignment) % kBoxAlignment);
  if (threadIdx.x == 0) InitBarriers(shared);
  __syncthreads();
  if (threadIdx.x < 2 * kWarpgroupThreads) {
    TakeRegisters<240>();
    WaitForPrevious();
    AttendTiles(shared, args.mha);
  } else {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize - kProductWarps;
    FlashTile first_tile;
    int32_t tiles_per_head = 0;
    if (warp == 0) {  // while there are registers; lengths are older than the kernel before
      tiles_per_head = CountTiles(args.mha);
      first_tile = FindTile(args.mha, args.heads_at_a_time, tiles_per_head, blockIdx.x);
    }
    GiveRegisters<24>();
    WaitForPrevious();
    if (warp == 0) {
      FindTiles(shared, args, tiles_per_head, first_tile);
    } else if (warp == 1) {
      if (threadIdx.x % kWarpSize == 0) CopySteps(shared, args);
    } else {
      CopyQueries(shared, args.mha, warp - 2);
    }
  }
}

// The heads of k_nope or v as one matrix.
MatrixShape HeadsOf(const RaggedMhaParams& params, const void* data, int64_t row_stride,
                    int64_t head_stride, int64_t columns) {
  return {data, params.num_keys, (params.num_heads - 1) * head_stride + columns, row_stride};
}
MatrixShape NopeKeys(const RaggedMhaParams& params) {
  return HeadsOf(params, params.k_nope, params.k_nope_row_stride, params.k_nope_head_stride,
                 kFlashNope);
}
MatrixShape RopeKeys(const RaggedMhaParams& params) {
  return {params.k_rope, params.num_keys, kFlashRope, params.k_rope_row_stride};
}
MatrixShape Values(const RaggedMhaParams& params) {
  return HeadsOf(params, params.v, params.v_row_stride, params.v_head_stride, kFlashValue);
}

// As many heads as have keys and values that the second-level cache holds; all if they have twice
// that, since blocks end less together where groups change.
int32_t HeadsAtATime(const RaggedMhaParams& params) {
  constexpr int64_t kCachedBytes = int64_t{32} << 20;
  const int64_t head_bytes = int64_t{params.num_keys} * (kFlashNope + kFlashValue) *
                             static_cast<int64_t>(sizeof(uint16_t));
  if (head_bytes * params.num_heads <= 2 * kCachedBytes) return params.num_heads;
  return static_cast<int32_t>(std::clamp<int64_t>(kCachedBytes / head_bytes, 1, params.num_heads));
}

}  // namespace

bool CanRunFlashMha(const RaggedMhaParams& params) {
  const auto aligned = [](const auto* pointer, int64_t row_stride, int64_t head_stride) {
    constexpr auto kChunk = static_cast<int64_t>(sizeof(uint4) / sizeof(*pointer));
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0 && row_stride % kChunk == 0 &&
           head_stride % kChunk == 0;
  };
  return params.kv_dtype == DType::kBfloat16 && params.qk_nope_head_dim == kFlashNope &&
         params.qk_rope_head_dim == kFlashRope && params.v_head_dim == kFlashValue &&
         params.softmax_scale > 0 && CanMap(NopeKeys(params)) && CanMap(RopeKeys(params)) &&
         CanMap(Values(params)) &&
         aligned(params.q_nope, params.q_nope_row_stride, params.q_nope_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride) &&
         (params.rounded_out != nullptr
              ? aligned(params.rounded_out, params.out_row_stride, params.out_head_stride)
              : aligned(params.out, params.out_row_stride, params.out_head_stride));
}

absl::Status FlashMha(const Launcher& launcher, const RaggedMhaParams& params) {
  FlashArgs args;
  args.mha = params;
  args.heads_at_a_time = HeadsAtATime(params);
  args.ticket = launcher.device.tickets;
  ASSIGN_OR_RETURN(args.k_nope, MakeTensorMap(NopeKeys(params)));
  ASSIGN_OR_RETURN(args.k_rope, MakeTensorMap(RopeKeys(params)));
  ASSIGN_OR_RETURN(args.v, MakeTensorMap(Values(params)));
  // Every sequence may end with a tile that is not full.
  const int64_t max_tiles =
      int64_t{CeilDiv(params.num_rows, kFlashRows) + params.num_seqs} * params.num_heads;
  return Launch(
      launcher, "flash_mha", FlashMhaKernel,
      {.grid = dim3(static_cast<uint32_t>(std::min<int64_t>(max_tiles, launcher.device.num_sms))),
       .threads = kFlashThreads,
       .shared_bytes = sizeof(FlashShared) + kBoxAlignment,
       .early = true},
      args);
}

}  // namespace kernels::cuda

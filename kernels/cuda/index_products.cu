#include "kernels/cuda/index_products.h"

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/float8_pair.cuh"
#include "kernels/cuda/indexer_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/narrow_product.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kHeads = 64;
constexpr int32_t kDim = 128;
constexpr int32_t kBoxes = kDim / kBoxColumns;
constexpr int32_t kSteps = kDim / kProductDepth;
constexpr int32_t kKeys = kProductRows;  // of a warpgroup's tile
constexpr int32_t kWarpgroups = 4;
constexpr int32_t kThreads = kWarpgroups * kWarpgroupThreads;
constexpr int32_t kRows = 8;  // of a block: rows of one sequence share the keys' way here
constexpr int32_t kSums = kHeads / 2;
static_assert(kHeads == kBoxRows);

// Keys are the left operand, from registers; a row's queries the right one, a box's rows its heads.
// The order of a key's values is free as long as both agree: thread t of four has values
// [32 t, 32 t + 32) of a key, four of them in every step.
struct Shared {
  uint16_t q[kRows][kBoxes][kBoxElements];
  float weights[kRows][kHeads];
  int32_t num_keys[kRows];  // that are scored
  int32_t seqs[kRows];
};
constexpr size_t kBoxAlignment = 1024;  // bytes

// Queries and weights of the block's rows [first, first + count), and how many keys of each are
// scored.
__device__ void LoadRows(Shared& shared, const IndexerLogitsParams& params, int32_t first,
                         int32_t count) {
  constexpr int32_t kFours = kDim / 4;
  constexpr int32_t kPasses = kHeads * kFours / kThreads;  // of a row
  static_assert(kHeads * kFours % kThreads == 0 && kThreads % kFours == 0);
  const int32_t four = static_cast<int32_t>(threadIdx.x) % kFours;
  const int32_t first_head = static_cast<int32_t>(threadIdx.x) / kFours;
  // Of step four % 8, the slots of thread four / 8.
  const int32_t column = four % kSteps * kProductDepth + four / kSteps * 2;
#pragma unroll 2
  for (int32_t row = 0; row < count; ++row) {
    const float* q = params.q + (first + row) * params.q_row_stride + 4 * four;
    float4 values[kPasses];
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t head = first_head + pass * (kThreads / kFours);
      values[pass] = __ldcg(reinterpret_cast<const float4*>(q + head * params.q_head_stride));
    }
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t head = first_head + pass * (kThreads / kFours);
      const auto store = [&](int32_t at, uint32_t pair) {
        const int32_t within = at % kBoxColumns;
        uint16_t* to = shared.q[row][at / kBoxColumns] + head * kBoxColumns +
                       (within / 8 ^ head % 8) * 8 + within % 8;
        *reinterpret_cast<uint32_t*>(to) = pair;
      };
      store(column, PackBfloat16(values[pass].x, values[pass].y));
      store(column + 8, PackBfloat16(values[pass].z, values[pass].w));
    }
  }
  for (int32_t i = threadIdx.x; i < count * kHeads; i += kThreads) {
    shared.weights[i / kHeads][i % kHeads] =
        params.weights[(first + i / kHeads) * params.weights_row_stride + i % kHeads];
  }
  if (static_cast<int32_t>(threadIdx.x) < count) {
    const int32_t visible = KeysOfRow(params.rows, first + static_cast<int32_t>(threadIdx.x)).count;
    const bool scored = visible > params.rows.top_k && visible <= params.logits_stride;
    shared.num_keys[threadIdx.x] = scored ? visible : 0;
    shared.seqs[threadIdx.x] = params.rows.row_to_seq[first + static_cast<int32_t>(threadIdx.x)];
  }
  PublishShared();
  __syncthreads();
}

// What a thread has of a tile's keys: a quarter of two of them.
template <bool kFloat8>
struct TileKeys {
  static constexpr int32_t kWords = kFloat8 ? 2 : 4;  // of 16 bytes, of a quarter of a key
  uint4 words[2][kWords];
  float scales[2];

  // -1: no such key, zeros.
  __device__ void Load(const KvPages& pages, const int32_t (&blocks)[2],
                       const int32_t (&entries)[2]) {
    const int32_t quarter = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const std::byte* block = pages.base + blocks[i] * pages.block_stride;
      constexpr int32_t kKeyBytes = kFloat8 ? kDim : 2 * kDim;
      const int32_t stride = kFloat8 ? kDim : pages.entry_bytes;
      const auto* from =
          reinterpret_cast<const uint4*>(block + entries[i] * stride + quarter * (kKeyBytes / 4));
#pragma unroll
      for (int32_t w = 0; w < kWords; ++w) {
        words[i][w] = blocks[i] < 0 ? make_uint4(0, 0, 0, 0) : __ldg(from + w);
      }
      scales[i] = 1;
      if (kFloat8 && blocks[i] >= 0) {
        scales[i] =
            __ldg(reinterpret_cast<const float*>(block + pages.block_size * kDim) + entries[i]);
      }
    }
  }

  __device__ void Spread(uint32_t (&a)[kSteps][4]) const {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (int32_t w = 0; w < kWords; ++w) {
        const uint4 four = words[i][w];
        if constexpr (kFloat8) {
          constexpr uint32_t k2To120 = 0x7b807b80;  // a pair of bf16
          const uint32_t codes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int32_t c = 0; c < 4; ++c) {
            const uint2 pairs = SpreadFloat8(codes[c]);
            a[4 * w + c][i] = MultiplyPair(pairs.x, k2To120);
            a[4 * w + c][i + 2] = MultiplyPair(pairs.y, k2To120);
          }
        } else {
          a[2 * w][i] = four.x;
          a[2 * w][i + 2] = four.y;
          a[2 * w + 1][i] = four.z;
          a[2 * w + 1][i + 2] = four.w;
        }
      }
    }
  }
};

// Sums over heads of this thread's two keys, in all four threads that share them.
__device__ void SumHeads(const float (&d)[kSums], const float* weights, float (&sums)[2]) {
  const int32_t quarter = static_cast<int32_t>(threadIdx.x) % 4;
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int32_t j = 0; j < kHeads / 8; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(weights + 8 * j + 2 * quarter);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      sums[i] = fmaf(two.x, fmaxf(d[4 * j + 2 * i], 0.0f), sums[i]);
      sums[i] = fmaf(two.y, fmaxf(d[4 * j + 2 * i + 1], 0.0f), sums[i]);
    }
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    sums[i] += __shfl_xor_sync(kFullWarp, sums[i], 1);
    sums[i] += __shfl_xor_sync(kFullWarp, sums[i], 2);
  }
}

// A tile of the keys of one sequence's rows, [begin, end) of the block's; begin is the number of
// rows behind the last tile.
struct Tile {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t num_keys = 0;  // that one of the rows scores
  int32_t index = 0;
};

// This warpgroup's tiles: `first` of every sequence, and every step-th one after it.
struct Tiles {
  const Shared& shared;
  int32_t num_rows;
  int32_t first;
  int32_t step;

  // The first tile of rows at or behind `begin`.
  __device__ Tile From(int32_t begin) const {
    Tile tile;
    for (tile.begin = begin; tile.begin < num_rows; tile.begin = tile.end) {
      tile.num_keys = 0;
      for (tile.end = tile.begin; tile.end < num_rows; ++tile.end) {
        if (shared.seqs[tile.end] != shared.seqs[tile.begin]) break;
        tile.num_keys = max(tile.num_keys, shared.num_keys[tile.end]);
      }
      tile.index = first;
      if (tile.index * kKeys < tile.num_keys) break;
    }
    return tile;
  }
  __device__ Tile After(Tile tile) const {
    tile.index += step;
    return tile.index * kKeys < tile.num_keys ? tile : From(tile.end);
  }
};

// Grid: shares of the keys, groups of kRows rows.
template <bool kFloat8>
__global__ void __launch_bounds__(kThreads, 1)
    IndexProductsKernel(const __grid_constant__ IndexerLogitsParams params, Fault* fault) {
  const auto address = reinterpret_cast<uintptr_t>(DynamicShared());
  auto& shared =
      *reinterpret_cast<Shared*>((address + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment);
  WaitForPrevious();
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  const int32_t num_rows = min(kRows, params.rows.num_rows - first_row);
  LoadRows(shared, params, first_row, num_rows);
  const KvPages& pages = params.pages;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  // Of a tile, and eight keys further on.
  const int32_t first_key = 16 * (static_cast<int32_t>(threadIdx.x) / kWarpSize % 4) + lane / 4;
  const int32_t warpgroup = static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads;
  const Tiles tiles{shared, num_rows, static_cast<int32_t>(blockIdx.x) * kWarpgroups + warpgroup,
                    static_cast<int32_t>(gridDim.x) * kWarpgroups};
  int32_t blocks[2], entries[2];
  const auto find = [&](const Tile& tile) {
    const bool exists = tile.begin < num_rows;
    const int32_t seq = exists ? shared.seqs[tile.begin] : 0;
    const int32_t* table = params.rows.block_table + seq * params.rows.block_table_stride;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t key = tile.index * kKeys + first_key + 8 * i;
      const int32_t index = key / pages.block_size;
      entries[i] = key - index * pages.block_size;
      blocks[i] = -1;
      if (!exists || key >= tile.num_keys) continue;
      if (index < params.rows.block_table_stride) blocks[i] = __ldg(table + index);
      if (blocks[i] < 0) NoteFault(fault, FaultKind::kNoBlock, seq, key);
    }
  };
  // A tile's keys are loaded while the one before it is scored, and its blocks are looked up
  // before.
  Tile tile = tiles.From(0);
  TileKeys<kFloat8> keys;
  find(tile);
  keys.Load(pages, blocks, entries);
  Tile next = tile.begin < num_rows ? tiles.After(tile) : tile;
  find(next);
  while (tile.begin < num_rows) {
    uint32_t a[kSteps][4];
    keys.Spread(a);
    const float scales[2] = {keys.scales[0] * params.scale, keys.scales[1] * params.scale};
    keys.Load(pages, blocks, entries);
    const Tile after = next.begin < num_rows ? tiles.After(next) : next;
    find(after);
#pragma unroll 1
    for (int32_t r = tile.begin; r < tile.end; ++r) {
      float d[kSums];
      const uint64_t q = DescribeRows(shared.q[r]);
      KeepSums(d);
      BeginProducts();
#pragma unroll
      for (int32_t s = 0; s < kSteps; ++s) {
        const int32_t at =
            s * kProductDepth / kBoxColumns * kBoxElements + s * kProductDepth % kBoxColumns;
        MultiplyNarrow(d, a[s], q + static_cast<uint32_t>(at) * sizeof(uint16_t) / 16, s > 0);
      }
      CommitProducts();
      WaitForProducts<0>();
      KeepSums(d);
      float sums[2];
      SumHeads(d, shared.weights[r], sums);
      const int32_t i = lane % 4;
      const int32_t key = tile.index * kKeys + first_key + 8 * i;
      if (i < 2 && key < shared.num_keys[r]) {
        params.logits[(first_row + r) * params.logits_stride + key] =
            i == 0 ? sums[0] * scales[0] : sums[1] * scales[1];
      }
    }
    tile = next;
    next = after;
  }
}

}  // namespace

bool CanRunIndexProducts(const IndexerLogitsParams& params) {
  const KvPages& pages = params.pages;
  return params.num_heads == kHeads && params.head_dim == kDim &&
         (pages.format == KvFormat::kFp8IndexKey || pages.format == KvFormat::kBfloat16) &&
         pages.block_stride % 16 == 0 && reinterpret_cast<uintptr_t>(pages.base) % 16 == 0 &&
         (pages.format == KvFormat::kFp8IndexKey || pages.entry_bytes % 16 == 0) &&
         params.q_row_stride % 4 == 0 && params.q_head_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(params.q) % 16 == 0;
}

absl::Status IndexProducts(const Launcher& launcher, const IndexerLogitsParams& params) {
  const int32_t groups = CeilDiv(params.rows.num_rows, kRows);
  const int64_t tiles = CeilDiv(params.logits_stride, int64_t{kKeys} * kWarpgroups);
  const int64_t shares = std::min<int64_t>(tiles, std::max(1, launcher.device.num_sms / groups));
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(shares), static_cast<uint32_t>(groups)),
      .threads = kThreads,
      .shared_bytes = sizeof(Shared) + kBoxAlignment,
      .early = true};
  Fault* fault = launcher.device.fault;
  return params.pages.format == KvFormat::kFp8IndexKey
             ? Launch(launcher, "indexer_logits", IndexProductsKernel<true>, shape, params, fault)
             : Launch(launcher, "indexer_logits", IndexProductsKernel<false>, shape, params, fault);
}

}  // namespace kernels::cuda

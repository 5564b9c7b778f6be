#include "kernels/cuda/expert_products.h"

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/moe.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kTileColumns = 256;

struct ExpertTile {
  int32_t expert = -1;    // -1: the shared one
  int32_t row_begin = 0;  // of the operand
  int32_t num_rows = 0;
  int32_t column_begin = 0;
};

// Where every expert's slots and row tiles begin; the last entry is their number.
struct TileTable {
  int32_t slot_begin[kMaxExperts + 1];
  int32_t tile_begin[kMaxExperts + 1];
};

// The first warp's work, before the block's barrier.
__device__ void MakeTable(const ExpertProduct& product, TileTable& table) {
  if (threadIdx.x >= kWarpSize) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  int32_t slots = 0, tiles = 0;
  for (int32_t begin = 0; begin < product.num_experts; begin += kWarpSize) {
    const int32_t expert = begin + lane;
    const int32_t count = expert < product.num_experts ? product.count[expert] : 0;
    const int32_t num_tiles = CeilDiv(count, kGemmRows);
    int32_t slots_to = count, tiles_to = num_tiles;
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t more_slots = __shfl_up_sync(kFullWarp, slots_to, offset);
      const int32_t more_tiles = __shfl_up_sync(kFullWarp, tiles_to, offset);
      if (lane >= offset) {
        slots_to += more_slots;
        tiles_to += more_tiles;
      }
    }
    if (expert < product.num_experts) {
      table.slot_begin[expert] = slots + slots_to - count;
      table.tile_begin[expert] = tiles + tiles_to - num_tiles;
    }
    slots += __shfl_sync(kFullWarp, slots_to, kWarpSize - 1);
    tiles += __shfl_sync(kFullWarp, tiles_to, kWarpSize - 1);
  }
  if (lane == 0) {
    table.slot_begin[product.num_experts] = slots;
    table.tile_begin[product.num_experts] = tiles;
  }
}

// Tile `index` of the routed experts: an expert's tiles with the same weights follow each other.
__device__ ExpertTile FindTile(const ExpertProduct& product, const TileTable& table,
                               int32_t tile_columns, int32_t index) {
  const int32_t column_tiles =
      static_cast<int32_t>(CeilDiv(product.columns, int64_t{tile_columns}));
  const int32_t row_tile = index / column_tiles;
  int32_t expert = 0,
          end = product.num_experts;  // tile_begin[expert] <= row_tile < tile_begin[end]
  while (end - expert > 1) {
    const int32_t middle = (expert + end) / 2;
    (table.tile_begin[middle] <= row_tile ? expert : end) = middle;
  }
  const int32_t count = table.slot_begin[expert + 1] - table.slot_begin[expert];
  const int32_t num_tiles = table.tile_begin[expert + 1] - table.tile_begin[expert];
  const int32_t within = index - table.tile_begin[expert] * column_tiles;
  const int32_t begin = within % num_tiles * kGemmRows;
  return {expert, table.slot_begin[expert] + begin, min(kGemmRows, count - begin),
          within / num_tiles * tile_columns};
}

// Grid: as many blocks as run at a time; they take the tiles in turns.  With kSwiGlu half of a
// tile's columns are rows of `first`, half those of `second` with the same columns.
template <bool kSwiGlu>
__global__ void __launch_bounds__(kGemmThreads, 1)
    ExpertsKernel(const __grid_constant__ ExpertProduct product) {
  __shared__ TileTable table;
  using Thread = GemmThread<kTileColumns>;
  constexpr int32_t kOutputs = kSwiGlu ? kTileColumns / 2 : kTileColumns;
  MakeTable(product, table);
  Thread thread(AlignedShared<GemmShared<kTileColumns>>());
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  const int32_t shared_row_tiles = CeilDiv(product.shared_rows, kGemmRows);
  const int32_t shared_tiles =
      shared_row_tiles * static_cast<int32_t>(CeilDiv(product.shared_columns, int64_t{kOutputs}));
  const int32_t routed_tiles = table.tile_begin[product.num_experts] *
                               static_cast<int32_t>(CeilDiv(product.columns, int64_t{kOutputs}));
  // Tiles of the shared expert, whose weights are few, stand spread among the others, whose weights
  // keep the memory busy; or, if one of them counts twice, they begin, and their blocks sit out the
  // next turn.
  const bool counts_twice = product.shared_depth >= 2 * product.depth && shared_tiles <= blocks &&
                            routed_tiles >= blocks - shared_tiles;
  const int32_t num_turns = routed_tiles + shared_tiles * (counts_twice ? 2 : 1);
  const auto sits_out = [&](int32_t turn) {
    return counts_twice && turn >= blocks && turn < blocks + shared_tiles;
  };
  const auto shared_before = [&](int32_t turn) {
    return counts_twice ? min(turn, shared_tiles)
                        : static_cast<int32_t>(int64_t{turn} * shared_tiles / num_turns);
  };
  const auto tile_at = [&](int32_t turn) {
    const int32_t before = shared_before(turn);
    if (shared_before(turn + 1) == before) {
      const int32_t left_out = counts_twice && turn >= blocks ? shared_tiles : 0;
      return FindTile(product, table, kOutputs, turn - before - left_out);
    }
    ExpertTile tile;
    tile.row_begin = before % shared_row_tiles * kGemmRows;
    tile.num_rows = min(kGemmRows, product.shared_rows - tile.row_begin);
    tile.column_begin = before / shared_row_tiles * kOutputs;
    return tile;
  };
  if (thread.copies()) {
    thread.BeginCopying();
    for (int32_t turn = static_cast<int32_t>(blockIdx.x); turn < num_turns; turn += blocks) {
      if (sits_out(turn)) continue;
      const ExpertTile tile = tile_at(turn);
      const bool is_shared = tile.expert < 0;
      const CUtensorMap* a = is_shared ? &product.shared_a : &product.a;
      const CUtensorMap* first = is_shared ? &product.shared_first : &product.first;
      const CUtensorMap* second = is_shared ? &product.shared_second : &product.second;
      thread.Copy(
          is_shared ? product.shared_depth : product.depth, tile.num_rows,
          [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t row) {
            CopyBox(to, a, barrier, k, tile.row_begin + row);
          },
          [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t column) {
            const bool is_second = column >= kOutputs;
            CopyBox(to, is_second ? second : first, barrier, k,
                    tile.column_begin + column - (is_second ? kOutputs : 0), max(tile.expert, 0));
          });
    }
    return;
  }
  thread.BeginMultiplying();
  for (int32_t turn = static_cast<int32_t>(blockIdx.x); turn < num_turns; turn += blocks) {
    if (sits_out(turn)) continue;
    const ExpertTile tile = tile_at(turn);
    const bool is_shared = tile.expert < 0;
    float sums[Thread::kSums];
    thread.Multiply(is_shared ? product.shared_depth : product.depth, tile.num_rows, sums);
    const int64_t columns = is_shared ? product.shared_columns : product.columns;
    uint16_t* out = is_shared ? product.shared_out : product.out;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = thread.Row(i);
      if (row >= tile.num_rows) continue;
      uint16_t* to = out + (tile.row_begin + row) * columns;
#pragma unroll
      for (int32_t j = 0; j < kOutputs / 8; ++j) {
        const int32_t column = tile.column_begin + thread.Column(j);
        float low = sums[4 * j + 2 * i], high = sums[4 * j + 2 * i + 1];
        if constexpr (kSwiGlu) {
          const float* up = sums + Thread::kSums / 2;
          low = RoughSwiGlu(low, up[4 * j + 2 * i], product.swiglu_limit);
          high = RoughSwiGlu(high, up[4 * j + 2 * i + 1], product.swiglu_limit);
        }
        if (column < columns) *reinterpret_cast<uint32_t*>(to + column) = PackBfloat16(low, high);
      }
    }
  }
}

template <bool kSwiGlu>
absl::Status LaunchProduct(const Launcher& launcher, const ExpertProduct& product) {
  return Launch(launcher, kSwiGlu ? "moe gate_up" : "moe down", ExpertsKernel<kSwiGlu>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kGemmThreads,
                 .shared_bytes = kGemmSharedBytes<kTileColumns>},
                product);
}

}  // namespace

absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProduct& product, bool swiglu) {
  return swiglu ? LaunchProduct<true>(launcher, product) : LaunchProduct<false>(launcher, product);
}

}  // namespace kernels::cuda

#include "kernels/cuda/expert_products.h"

#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tile_turns.cuh"
#include "kernels/cuda/token_tile.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kWeightRows = 256;  // of a tile
template <bool kSwiGlu>
constexpr int32_t kOutputs = kSwiGlu ? kWeightRows / 2 : kWeightRows;

// What the warps that multiply do with a tile of at most kTokens tokens.
template <bool kSwiGlu, int32_t kTokens, typename Thread>
__device__ void MultiplyTile(const ExpertProduct& product, Thread& thread, const ExpertTile& tile) {
  float sums[2][kTokens / 2] = {};
  thread.template Multiply<kTokens>(DepthOf(product, tile), sums);
  const int64_t columns = ColumnsOf(product, tile);
  uint16_t* out = OutputOf(product, tile);
  const auto store = [&](int32_t column, int32_t token, uint4 values) {
    column += tile.column_begin;
    if (token < tile.num_rows && column < columns) {
      *reinterpret_cast<uint4*>(out + token * columns + column) = values;
    }
  };
  if constexpr (kSwiGlu) {
    thread.template StoreTransposed<kTokens>(
        [&](int32_t i, int32_t j, int32_t c) {
          const int32_t at = 4 * j + 2 * i + c;
          return RoughSwiGlu(sums[0][at], sums[1][at], product.swiglu_limit);
        },
        store);
  } else {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      thread.template StoreTransposed<kTokens>(
          [&](int32_t i, int32_t j, int32_t c) { return sums[h][4 * j + 2 * i + c]; },
          [&](int32_t column, int32_t token, uint4 values) {
            store(column + h * kWeightRows / 2, token, values);
          });
    }
  }
}

// The same in the form for as few tokens, kTokens or more, as the tile has.
template <bool kSwiGlu, int32_t kTokens, typename Thread>
__device__ void MultiplyFewest(const ExpertProduct& product, Thread& thread,
                               const ExpertTile& tile) {
  if constexpr (kTokens < Thread::kMaxTokens) {
    if (tile.num_rows > kTokens) {
      return MultiplyFewest<kSwiGlu, kTokens + kTokenStep>(product, thread, tile);
    }
  }
  MultiplyTile<kSwiGlu, kTokens>(product, thread, tile);
}

// The block's warps that multiply and the thread that copies tokens.
constexpr int32_t kTakers = kMultiplyWarps + 1;

// Grid: as many blocks as run at a time.
template <bool kSwiGlu, int32_t kTileTokens>
__global__ void __launch_bounds__(kTokenTileThreads, 1)
    ExpertsKernel(const __grid_constant__ ExpertProduct product) {
  using Thread = TokenTileThread<kTileTokens>;
  __shared__ TileTable table;
  __shared__ TileTurns::Shared shared_turns;
  MakeTable(product, kTileTokens, table);
  TileTurns turns(shared_turns, product.num_drawn, kTakers);
  Thread thread(AlignedShared<typename Thread::Shared>());
  if (thread.multiplies()) {
    TakeRegisters<232>();
    WaitForPrevious();
    turns.ForEach(/*is_warp=*/true, [&](const ExpertTile& tile) {
      MultiplyFewest<kSwiGlu, kTokenStep>(product, thread, tile);
    });
    return;
  }
  GiveRegisters<40>();
  if (thread.copies_weights()) {
    const TileOrder<kOutputs<kSwiGlu>> order(product, kTileTokens, table);
    int32_t turn = static_cast<int32_t>(blockIdx.x);
    while (turn < order.num_turns()) {
      const ExpertTile tile = order.TileAt(turn);
      turns.Give(tile);
      const int64_t depth = DepthOf(product, tile);
      // Late, for the next tile is the block's that is free first; but not last, for it takes time.
      const int64_t draw_at =
          max(CeilDiv(depth, int64_t{kBoxColumns}) - Thread::kStages, int64_t{0});
      thread.CopyWeights(depth, [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t row) {
        if (k == draw_at * kBoxColumns && row == 0) {
          WaitForPrevious();
          turn = turns.Draw();
        }
        CopyWeightBox(product, tile, kSwiGlu, to, barrier, k, row);
      });
    }
    turns.Give(ExpertTile{});
    WaitForPrevious();
  } else if (thread.copies_tokens()) {
    WaitForPrevious();
    turns.ForEach(/*is_warp=*/false, [&](const ExpertTile& tile) {
      const CUtensorMap* tokens = tile.is_shared() ? &product.shared_tokens : &product.tokens;
      thread.CopyTokens(DepthOf(product, tile), tile.num_rows,
                        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t token) {
                          CopyBox(to, tokens, barrier, k, tile.row_begin + token);
                        });
    });
  }
}

template <bool kSwiGlu, int32_t kTileTokens>
absl::Status LaunchProduct(const Launcher& launcher, const ExpertProduct& product) {
  return Launch(launcher, kSwiGlu ? "moe gate_up" : "moe down", ExpertsKernel<kSwiGlu, kTileTokens>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kTokenTileThreads,
                 .shared_bytes = TokenTileThread<kTileTokens>::kSharedBytes,
                 .early = true},
                product);
}

// Wide tiles read the weights less often, and have a stage less under way, which few rows an
// expert, whose weights come from memory, do not forgive.
template <bool kSwiGlu>
absl::Status LaunchProduct(const Launcher& launcher, const ExpertProduct& product) {
  constexpr int32_t kNarrow = 160, kWide = 192, kWideFrom = 128;
  return product.num_slots > int64_t{kWideFrom} * product.num_experts
             ? LaunchProduct<kSwiGlu, kWide>(launcher, product)
             : LaunchProduct<kSwiGlu, kNarrow>(launcher, product);
}

}  // namespace

absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProduct& product, bool swiglu) {
  return swiglu ? LaunchProduct<true>(launcher, product) : LaunchProduct<false>(launcher, product);
}

}  // namespace kernels::cuda

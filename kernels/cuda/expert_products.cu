#include "kernels/cuda/expert_products.h"

#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/grid_count.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tile_turns.cuh"
#include "kernels/cuda/token_tile.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kWeightRows = 256;  // of a tile
template <bool kSwiGlu>
constexpr int32_t kOutputs = kSwiGlu ? kWeightRows / 2 : kWeightRows;

// The tiles of both products by turn: all of the first one's before any of the second one's, so
// that a block which waits for results waits for blocks that have begun.
class ProductOrder {
 public:
  // The table is made.
  __device__ ProductOrder(const ExpertProducts& products, int32_t tile_tokens,
                          const TileTable& table)
      : gate_up_(products.gate_up, tile_tokens, table), down_(products.down, tile_tokens, table) {}

  __device__ int32_t num_turns() const { return gate_up_.num_turns() + down_.num_turns(); }
  __device__ ExpertTile TileAt(int32_t turn) const {
    if (turn < gate_up_.num_turns()) return gate_up_.TileAt(turn);
    ExpertTile tile = down_.TileAt(turn - gate_up_.num_turns());
    tile.is_down = true;
    return tile;
  }
  // Warps' parts of the first product's tiles of an expert.
  __device__ int32_t PartsOf(int32_t expert) const {
    return gate_up_.TilesOf(expert) * kMultiplyWarps;
  }

 private:
  TileOrder<kOutputs<true>> gate_up_;
  TileOrder<kOutputs<false>> down_;
};

// The tile of the first product whose results a warp has stored last, and not counted yet: it waits
// for nothing if there is a product between.
class StoredPart {
 public:
  __device__ explicit StoredPart(const ExpertProducts& products)
      : num_stored_(products.num_stored), num_experts_(products.gate_up.num_experts) {}

  __device__ void Set(const ExpertTile& tile) {
    expert_ = tile.is_shared() ? num_experts_ : tile.expert;
  }
  __device__ void Count() {
    if (expert_ < 0) return;
    PublishToCopies();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) AddToCount(num_stored_ + expert_, 1);
    expert_ = -1;
  }

 private:
  int32_t* const num_stored_;
  const int32_t num_experts_;
  int32_t expert_ = -1;  // none
};

// What the warps that multiply do with a tile of at most kTokens tokens; `stored` of the one before
// is counted between product and results.
template <bool kSwiGlu, int32_t kTokens, typename Thread>
__device__ __forceinline__ void MultiplyTile(const ExpertProduct& product, Thread& thread,
                                             const ExpertTile& tile, StoredPart& stored) {
  float sums[2][kTokens / 2] = {};
  thread.template Multiply<kTokens>(DepthOf(product, tile), sums);
  if constexpr (kSwiGlu) stored.Count();
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
    stored.Set(tile);
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
__device__ __forceinline__ void MultiplyFewest(const ExpertProduct& product, Thread& thread,
                                               const ExpertTile& tile, StoredPart& stored) {
  if constexpr (kTokens < Thread::kMaxTokens) {
    if (tile.num_rows > kTokens) {
      return MultiplyFewest<kSwiGlu, kTokens + kTokenStep>(product, thread, tile, stored);
    }
  }
  MultiplyTile<kSwiGlu, kTokens>(product, thread, tile, stored);
}

// The block's warps that multiply and the thread that copies tokens.
constexpr int32_t kTakers = kMultiplyWarps + 1;

// Grid: as many blocks as run at a time.
template <int32_t kTileTokens>
__global__ void __launch_bounds__(kTokenTileThreads, 1)
    ExpertsKernel(const __grid_constant__ ExpertProducts products) {
  using Thread = TokenTileThread<kTileTokens>;
  __shared__ TileTable table;
  __shared__ TileTurns::Shared shared_turns;
  const ExpertProduct& gate_up = products.gate_up;
  const int32_t* counts = gate_up.count;
  if (products.ids != nullptr) {
    CountSlots(products.ids, static_cast<int32_t>(gate_up.num_slots), gate_up.num_experts, table);
    counts = table.tile_begin;
  }
  MakeTable(gate_up, counts, kTileTokens, table);
  TileTurns turns(shared_turns, products.num_drawn, kTakers);
  Thread thread(AlignedShared<typename Thread::Shared>());
  const auto product_of = [&](const ExpertTile& tile) -> const ExpertProduct& {
    return tile.is_down ? products.down : products.gate_up;
  };
  if (thread.multiplies()) {
    TakeRegisters<232>();
    WaitForPrevious();
    StoredPart stored(products);
    for (ExpertTile tile; turns.Take(/*is_warp=*/true, tile);) {
      if (tile.is_down) {
        stored.Count();  // somebody may wait for it, this block perhaps
        MultiplyFewest<false, kTokenStep>(products.down, thread, tile, stored);
      } else {
        MultiplyFewest<true, kTokenStep>(products.gate_up, thread, tile, stored);
      }
    }
    stored.Count();
    return;
  }
  GiveRegisters<40>();
  const ProductOrder order(products, kTileTokens, table);
  if (thread.copies_weights()) {
    int32_t turn = static_cast<int32_t>(blockIdx.x);
    while (turn < order.num_turns()) {
      const ExpertTile tile = order.TileAt(turn);
      turns.Give(tile);
      const ExpertProduct& product = product_of(tile);
      const int64_t depth = DepthOf(product, tile);
      // Late, for the next tile is the block's that is free first; but not last, for it takes time.
      const int64_t draw_at =
          max(CeilDiv(depth, int64_t{kBoxColumns}) - Thread::kStages, int64_t{0});
      thread.CopyWeights(depth, [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t row) {
        if (k == draw_at * kBoxColumns && row == 0) {
          WaitForPrevious();
          turn = turns.Draw();
        }
        CopyWeightBox(product, tile, !tile.is_down, to, barrier, k, row);
      });
    }
    turns.Give(ExpertTile{});
    WaitForPrevious();
  } else if (thread.copies_tokens()) {
    WaitForPrevious();
    for (ExpertTile tile; turns.Take(/*is_warp=*/false, tile);) {
      const ExpertProduct& product = product_of(tile);
      if (tile.is_down) {
        const int32_t expert = tile.is_shared() ? product.num_experts : tile.expert;
        WaitForCount(products.num_stored + expert, order.PartsOf(tile.expert));
        PublishToCopies();
      }
      const CUtensorMap* tokens = tile.is_shared() ? &product.shared_tokens : &product.tokens;
      thread.CopyTokens(DepthOf(product, tile), tile.num_rows,
                        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t token) {
                          CopyBox(to, tokens, barrier, k, tile.row_begin + token);
                        });
    }
  }
}

template <int32_t kTileTokens>
absl::Status LaunchProducts(const Launcher& launcher, const ExpertProducts& products) {
  return Launch(launcher, "moe experts", ExpertsKernel<kTileTokens>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kTokenTileThreads,
                 .shared_bytes = TokenTileThread<kTileTokens>::kSharedBytes,
                 .early = true},
                products);
}

}  // namespace

// Wide tiles read the weights less often, and have a stage less under way, which few rows an
// expert, whose weights come from memory, do not forgive.
absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProducts& products) {
  constexpr int32_t kNarrow = 160, kWide = 192, kWideFrom = 128;
  return products.gate_up.num_slots > int64_t{kWideFrom} * products.gate_up.num_experts
             ? LaunchProducts<kWide>(launcher, products)
             : LaunchProducts<kNarrow>(launcher, products);
}

}  // namespace kernels::cuda

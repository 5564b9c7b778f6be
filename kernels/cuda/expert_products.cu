#include "kernels/cuda/expert_products.h"

#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/token_tile.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kWeightRows = 256;  // of a tile
template <bool kSwiGlu>
constexpr int32_t kOutputs = kSwiGlu ? kWeightRows / 2 : kWeightRows;

// What the warps that multiply do with a tile of at most kTokens tokens.
template <bool kSwiGlu, int32_t kTokens>
__device__ void MultiplyTile(const ExpertProduct& product, TokenTileThread& thread,
                             const ExpertTile& tile) {
  float sums[2][kTokens / 2] = {};
  thread.Multiply<kTokens>(DepthOf(product, tile), sums);
  const int64_t columns = ColumnsOf(product, tile);
  uint16_t* out = OutputOf(product, tile);
  const auto store = [&](int32_t column, int32_t token, uint32_t word) {
    column += tile.column_begin;
    if (token < tile.num_rows && column < columns) {
      *reinterpret_cast<uint32_t*>(out + token * columns + column) = word;
    }
  };
  if constexpr (kSwiGlu) {
    thread.StoreTransposed<kTokens>(
        [&](int32_t i, int32_t j, int32_t c) {
          const int32_t at = 4 * j + 2 * i + c;
          return RoughSwiGlu(sums[0][at], sums[1][at], product.swiglu_limit);
        },
        store);
  } else {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      thread.StoreTransposed<kTokens>(
          [&](int32_t i, int32_t j, int32_t c) { return sums[h][4 * j + 2 * i + c]; },
          [&](int32_t column, int32_t token, uint32_t word) {
            store(column + h * kWeightRows / 2, token, word);
          });
    }
  }
}

// The form for as many tokens as the tile has.
template <bool kSwiGlu>
__device__ void MultiplyTile(const ExpertProduct& product, TokenTileThread& thread,
                             const ExpertTile& tile) {
  switch (CeilDiv(tile.num_rows, kTokenStep)) {
    case 1:
      return MultiplyTile<kSwiGlu, 16>(product, thread, tile);
    case 2:
      return MultiplyTile<kSwiGlu, 32>(product, thread, tile);
    case 3:
      return MultiplyTile<kSwiGlu, 48>(product, thread, tile);
    case 4:
      return MultiplyTile<kSwiGlu, 64>(product, thread, tile);
    case 5:
      return MultiplyTile<kSwiGlu, 80>(product, thread, tile);
    case 6:
      return MultiplyTile<kSwiGlu, 96>(product, thread, tile);
    case 7:
      return MultiplyTile<kSwiGlu, 112>(product, thread, tile);
    default:
      return MultiplyTile<kSwiGlu, 128>(product, thread, tile);
  }
}

// Grid: as many blocks as run at a time; they take the tiles in turns.  What a tile costs grows
// with its tokens.
template <bool kSwiGlu>
__global__ void __launch_bounds__(kTokenTileThreads, 1)
    ExpertsKernel(const __grid_constant__ ExpertProduct product) {
  __shared__ TileTable table;
  MakeTable(product, table);
  TokenTileThread thread(AlignedShared<TokenTileShared>());
  const TileOrder<kOutputs<kSwiGlu>> order(product, table);
  if (thread.multiplies()) {
    TakeRegisters<232>();
    WaitForPrevious();
    order.ForEach([&](const ExpertTile& tile) { MultiplyTile<kSwiGlu>(product, thread, tile); });
    return;
  }
  GiveRegisters<40>();
  if (thread.copies_weights()) {
    order.ForEach([&](const ExpertTile& tile) {
      thread.CopyWeights(DepthOf(product, tile),
                         [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t row) {
                           CopyWeightBox(product, tile, kSwiGlu, to, barrier, k, row);
                         });
    });
  } else if (thread.copies_tokens()) {
    WaitForPrevious();
    order.ForEach([&](const ExpertTile& tile) {
      const CUtensorMap* tokens = tile.is_shared() ? &product.shared_tokens : &product.tokens;
      thread.CopyTokens(DepthOf(product, tile), tile.num_rows,
                        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t token) {
                          CopyBox(to, tokens, barrier, k, tile.row_begin + token);
                        });
    });
  }
}

template <bool kSwiGlu>
absl::Status LaunchProduct(const Launcher& launcher, const ExpertProduct& product) {
  return Launch(launcher, kSwiGlu ? "moe gate_up" : "moe down", ExpertsKernel<kSwiGlu>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kTokenTileThreads,
                 .shared_bytes = kTokenTileSharedBytes,
                 .early = true},
                product);
}

}  // namespace

absl::Status MultiplyExperts(const Launcher& launcher, const ExpertProduct& product, bool swiglu) {
  return swiglu ? LaunchProduct<true>(launcher, product) : LaunchProduct<false>(launcher, product);
}

}  // namespace kernels::cuda

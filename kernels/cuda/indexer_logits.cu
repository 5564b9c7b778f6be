#include <algorithm>

#include "kernels/cuda/index_products.h"
#include "kernels/cuda/indexer.h"
#include "kernels/cuda/indexer_rows.cuh"
#include "kernels/cuda/kv_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile_product.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

// Blocks a multiprocessor takes at a time; more rows than that share them.
constexpr int32_t kBlocksPerSm = 4;

struct Shared {
  TileShared tile;
  float weighted[kTileRows][kTileColumns + 1];
};

// Logits of keys [begin, begin + kTileColumns) of a row: heads in tiles of kTileRows, added in
// ascending order.
__device__ void ScoreTile(const IndexerLogitsParams& params, int32_t row, const VisibleKeys& seen,
                          int32_t begin, Shared& shared, Fault* fault) {
  const int32_t count = min(kTileColumns, seen.count - begin);
  const KvPages& pages = params.pages;
  const auto load_key = [&](int32_t c, int64_t k) {
    if (c >= count) return 0.0f;
    const int32_t block = seen.BlockOf(begin + c, pages.block_size);
    if (block < 0) {
      NoteFault(fault, FaultKind::kNoBlock, seen.seq, begin + c);
      return 0.0f;
    }
    const int64_t slot = int64_t{block} * pages.block_size + (begin + c) % pages.block_size;
    return LoadValue(PartsOfSlot(pages, slot, params.head_dim, 0), pages.format, params.head_dim,
                     static_cast<int32_t>(k));
  };
  const float* q = params.q + row * params.q_row_stride;
  const float* weights = params.weights + row * params.weights_row_stride;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  float sum = 0;  // of key `thread`
  for (int32_t first = 0; first < params.num_heads; first += kTileRows) {
    const int32_t heads = min(kTileRows, params.num_heads - first);
    const auto load_query = [&](int32_t r, int64_t k) {
      return r < heads ? q[(first + r) * params.q_head_stride + k] : 0.0f;
    };
    const TileSums sums = MultiplyTile(shared.tile, params.head_dim, load_query, load_key);
    for (int32_t i = 0; i < 2; ++i) {
      const float weight = TileRow(i) < heads ? weights[first + TileRow(i)] : 0.0f;
      for (int32_t j = 0; j < 4; ++j) {
        const float score = sums.value[i][j] < 0 ? 0.0f : sums.value[i][j];  // NaN stays NaN
        shared.weighted[TileRow(i)][TileColumn(j)] = weight * score;
      }
    }
    __syncthreads();
    for (int32_t h = 0; thread < count && h < heads; ++h) sum += shared.weighted[h][thread];
    __syncthreads();
  }
  if (thread < count)
    params.logits[row * params.logits_stride + begin + thread] = sum * params.scale;
}

// Grid: shares of a row's tiles, rows.
__global__ void __launch_bounds__(kTileThreads)
    IndexerLogitsKernel(IndexerLogitsParams params, Fault* fault) {
  __shared__ Shared shared;
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const VisibleKeys seen = KeysOfRow(params.rows, row);
  if (seen.count <= params.rows.top_k || seen.count > params.logits_stride) return;
  const int32_t step = static_cast<int32_t>(gridDim.x) * kTileColumns;
  for (int32_t begin = static_cast<int32_t>(blockIdx.x) * kTileColumns; begin < seen.count;
       begin += step) {
    ScoreTile(params, row, seen, begin, shared, fault);
  }
}

}  // namespace

absl::Status IndexerLogits(const Launcher& launcher, const IndexerLogitsParams& params) {
  RETURN_IF_ERROR(CheckIndexerLogits(params));
  const int32_t num_rows = params.rows.num_rows;
  if (num_rows == 0 || params.logits_stride <= params.rows.top_k) return absl::OkStatus();
  if (launcher.device.bfloat16 && CanRunIndexProducts(params)) {
    return IndexProducts(launcher, params);
  }
  const int64_t tiles = CeilDiv(params.logits_stride, int64_t{kTileColumns});
  const int64_t shares =
      std::min<int64_t>(tiles, CeilDiv(kBlocksPerSm * launcher.device.num_sms, num_rows));
  return Launch(launcher, "indexer_logits", IndexerLogitsKernel,
                {.grid = dim3(static_cast<uint32_t>(shares), static_cast<uint32_t>(num_rows)),
                 .threads = kTileThreads,
                 .early = true},
                params, launcher.device.fault);
}

}  // namespace kernels::cuda

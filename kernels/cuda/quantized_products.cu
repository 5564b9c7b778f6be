#include "kernels/cuda/quantized_products.h"

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/fragment_order.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/quantized_tile.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kMultipliers = kQuantizedWarps * kWarpSize;
constexpr int32_t kThreads = kMultipliers + kWarpgroupThreads;  // the last ones copy

struct Args {
  QuantizedProduct product;
  int32_t tile_tokens = 0;
  int32_t num_stages = 0;
};

// A column of the output: where token 0's value goes, and the others' `stride` further on.
struct OutputColumn {
  void* to = nullptr;               // null: there is no such column
  int64_t stride = 0;               // elements
  bool rounds = false;              // to bf16, else float32
  const float* residual = nullptr;  // laid out as the output; null: none

  __device__ float Residual(int32_t token) const {
    return residual == nullptr ? 0 : residual[token * stride];
  }
  // `value` has the residual in it.
  __device__ void Store(int32_t token, float value) const {
    if (to == nullptr) return;
    const int64_t at = token * stride;
    if (rounds) {
      static_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(PackBfloat16(value, 0));
    } else {
      static_cast<float*>(to)[at] = value;
    }
  }
};
__device__ OutputColumn FindColumn(const QuantizedProduct& product, const ExpertTile& tile,
                                   int64_t column) {
  const int64_t columns = ColumnsOf(product.tiles, tile);
  if (column >= columns) return {};
  if (!product.is_linear) {
    return {OutputOf(product.tiles, tile) + OrderedPlace(product.out_order, column), columns, true,
            nullptr};
  }
  const OutputSegment* segment = FindSegment(product.output, column);
  if (segment == nullptr) return {};
  const int64_t at = tile.row_begin * segment->row_stride + column;
  if (segment->dtype == DType::kBfloat16) {
    return {static_cast<uint16_t*>(segment->data) + at, segment->row_stride, true, nullptr};
  }
  const float* residual = product.output.residual;
  return {static_cast<float*>(segment->data) + at, segment->row_stride, false,
          residual == nullptr ? nullptr : residual + at};
}

// This block's range of a tile's depth: of kSplits that a cluster cuts it into.
template <int32_t kSplits>
__device__ StageRange StagesOfBlock(int64_t depth) {
  const auto stages = static_cast<int32_t>(CeilDiv(depth, int64_t{kQuantizedDepth}));
  const auto split = static_cast<int32_t>(blockIdx.x) % kSplits;
  return {stages * split / kSplits, stages * (split + 1) / kSplits};
}

template <int32_t kTokens>
__device__ void StoreSums(const QuantizedProduct& product, const float (&sums)[kTokens / 2],
                          int32_t num_tokens, const OutputColumn& top, const OutputColumn& bottom) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
  for (int32_t j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int32_t c = 0; c < 2; ++c) {
      const int32_t token = 8 * j + 2 * t + c;
      if (token >= num_tokens) continue;
      const float a = sums[4 * j + c], b = sums[4 * j + 2 + c];
      if (product.swiglu) {
        top.Store(token, SwiGlu(a, b, product.tiles.swiglu_limit));
      } else {
        top.Store(token, a + top.Residual(token));
        bottom.Store(token, b + bottom.Residual(token));
      }
    }
  }
}

__device__ void SyncMultipliers() {
  asm volatile("bar.sync 1, %0;" : : "n"(kMultipliers) : "memory");
}

// Adds the sums of the cluster's blocks, in ascending order, and stores every kSplits-th of a
// thread's.  `exchange` is shared: [kTokens / 2, kMultipliers].
template <int32_t kSplits, int32_t kTokens>
__device__ void StoreSplitSums(const float (&sums)[kTokens / 2], float* exchange,
                               int32_t num_tokens, const OutputColumn& top,
                               const OutputColumn& bottom) {
  constexpr int32_t kOwn = kTokens / 2 / kSplits;
  const auto split = static_cast<int32_t>(blockIdx.x) % kSplits;
  float* own = exchange + threadIdx.x;
#pragma unroll
  for (int32_t i = 0; i < kTokens / 2; ++i) own[i * kMultipliers] = sums[i];
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  const auto token_of = [&](int32_t i) { return 8 * (i / 4) + 2 * t + i % 2; };
  const auto column_of = [&](int32_t i) -> OutputColumn { return i / 2 % 2 == 0 ? top : bottom; };
  // The residual may be the output: a thread reads what it will write.
  float totals[kOwn];
#pragma unroll
  for (int32_t m = 0; m < kOwn; ++m) {
    const int32_t i = m * kSplits + split;
    totals[m] = token_of(i) < num_tokens ? column_of(i).Residual(token_of(i)) : 0.0f;
  }
  ClusterBarrier();
#pragma unroll
  for (int32_t m = 0; m < kOwn; ++m) {
    float sum = 0;
#pragma unroll
    for (uint32_t s = 0; s < kSplits; ++s) {
      sum += __uint_as_float(LoadFromRank(
          reinterpret_cast<const uint32_t*>(own + (m * kSplits + split) * kMultipliers), s));
    }
    totals[m] += sum;
  }
#pragma unroll
  for (int32_t m = 0; m < kOwn; ++m) {
    const int32_t i = m * kSplits + split;
    if (token_of(i) < num_tokens) column_of(i).Store(token_of(i), totals[m]);
  }
  ClusterBarrier();  // nobody goes while its sums are read
}

template <WeightFormat kFormat, int32_t kSplits, int32_t kTokens>
__device__ void MultiplyTile(const QuantizedProduct& product, QuantizedRing<kFormat>& ring,
                             QuantizedBarriers& barriers, const ExpertTile& tile) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4;
  const WarpRows rows = RowsOfWarp(warp, product.swiglu);
  const int64_t top = tile.column_begin + rows.top + g;
  const int64_t bottom = product.swiglu ? top : top + 8;
  const StageScales<kFormat> scales(product, tile, top, bottom, product.swiglu);
  float sums[kTokens / 2] = {};
  MultiplyDepth<kFormat, kTokens>(ring, barriers, rows, scales,
                                  StagesOfBlock<kSplits>(DepthOf(product.tiles, tile)), sums);
  const OutputColumn top_column = FindColumn(product, tile, top);
  const OutputColumn bottom_column = FindColumn(product, tile, bottom);
  if constexpr (kSplits > 1) {
    SyncMultipliers();  // all have read their operands, whose memory takes the sums
    StoreSplitSums<kSplits, kTokens>(sums, ring.memory(), tile.num_rows, top_column, bottom_column);
  } else {
    StoreSums<kTokens>(product, sums, tile.num_rows, top_column, bottom_column);
  }
}

// A block's tiles, or a cluster's if it cuts their depth: every so many-th.  Half of a tile's
// weight rows are up rows with SwiGLU.
template <int32_t kSplits>
class BlockTiles {
 public:
  __device__ BlockTiles(const Args& args, const TileTable& table)
      : swiglu_(args.product.swiglu),
        half_(args.product.tiles, args.tile_tokens, table),
        whole_(args.product.tiles, args.tile_tokens, table) {}

  template <typename Take>
  __device__ void ForEach(Take take) const {
    const int32_t num_turns = swiglu_ ? half_.num_turns() : whole_.num_turns();
    for (auto turn = static_cast<int32_t>(blockIdx.x) / kSplits; turn < num_turns;
         turn += static_cast<int32_t>(gridDim.x) / kSplits) {
      take(swiglu_ ? half_.TileAt(turn) : whole_.TileAt(turn));
    }
  }

 private:
  const bool swiglu_;
  const TileOrder<kQuantizedRows / 2> half_;
  const TileOrder<kQuantizedRows> whole_;
};

template <WeightFormat kFormat, int32_t kSplits>
__device__ void MultiplyTiles(const QuantizedProduct& product, const BlockTiles<kSplits>& tiles,
                              QuantizedRing<kFormat>& ring, QuantizedBarriers& barriers) {
  tiles.ForEach([&](const ExpertTile& tile) {
    if (tile.num_rows <= 16) {
      MultiplyTile<kFormat, kSplits, 16>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 32) {
      MultiplyTile<kFormat, kSplits, 32>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 64) {
      MultiplyTile<kFormat, kSplits, 64>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 96) {
      MultiplyTile<kFormat, kSplits, 96>(product, ring, barriers, tile);
    } else {
      MultiplyTile<kFormat, kSplits, kMaxTileTokens>(product, ring, barriers, tile);
    }
  });
}

// One thread's work.
template <WeightFormat kFormat, int32_t kSplits>
__device__ void CopyTiles(const QuantizedProduct& product, const BlockTiles<kSplits>& tiles,
                          QuantizedRing<kFormat>& ring, QuantizedBarriers& barriers) {
  const ExpertProduct& all = product.tiles;
  tiles.ForEach([&](const ExpertTile& tile) {
    const bool is_shared = tile.is_shared();
    const CUtensorMap* first = is_shared ? &all.shared_first : &all.first;
    const CUtensorMap* second = is_shared ? &all.shared_second : &all.second;
    const CUtensorMap* tokens = is_shared ? &all.shared_tokens : &all.tokens;
    const int32_t expert = max(tile.expert, 0);
    const StageRange stages = StagesOfBlock<kSplits>(DepthOf(all, tile));
    const int32_t boxes = CeilDiv(tile.num_rows, kTokenStep);
    for (int32_t s = stages.begin; s < stages.end; ++s, ring.Advance()) {
      Barrier* full = &barriers.full[ring.stage()];
      WaitFor(&barriers.empty[ring.stage()], ring.parity() ^ 1);
      ArriveAndExpect(
          full, static_cast<uint32_t>(QuantizedRing<kFormat>::StageBytes(boxes * kTokenStep)));
      constexpr int32_t kRowBytes = RowBytesOf(kFormat);
      const int32_t byte = s * kRowBytes, k = s * kQuantizedDepth;
      CopyBox(ring.weights(), first, full, byte, tile.column_begin, expert);
      CopyBox(ring.weights() + kBoxRows * kRowBytes, product.swiglu ? second : first, full, byte,
              tile.column_begin + (product.swiglu ? 0 : kBoxRows), expert);
      for (int32_t half = 0; half < 2; ++half) {
        for (int32_t box = 0; box < boxes; ++box) {
          CopyBox(ring.tokens(half) + box * kTokenStep * kBoxColumns, tokens, full,
                  k + half * kBoxColumns, tile.row_begin + box * kTokenStep);
        }
      }
    }
  });
}

// Grid: as many blocks as run at a time; a cluster of kSplits cuts a tile's depth.
template <WeightFormat kFormat, int32_t kSplits>
__global__ void __cluster_dims__(kSplits) __launch_bounds__(kThreads, 1)
    QuantizedKernel(const __grid_constant__ Args args) {
  __shared__ TileTable table;
  __shared__ QuantizedBarriers barriers;
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < args.num_stages; ++s) {
      InitBarrier(&barriers.full[s], 1);
      InitBarrier(&barriers.empty[s], kQuantizedWarps);
    }
    PublishBarriers();
  }
  WaitForPrevious();
  MakeTable(args.product.tiles, args.product.tiles.count, args.tile_tokens, table);
  __syncthreads();
  const BlockTiles<kSplits> tiles(args, table);
  QuantizedRing<kFormat> ring(&AlignedShared<std::byte>(), args.tile_tokens, args.num_stages);
  if (threadIdx.x < kMultipliers) {
    TakeRegisters<232>();
    MultiplyTiles<kFormat, kSplits>(args.product, tiles, ring, barriers);
  } else {
    GiveRegisters<40>();
    if (threadIdx.x == kMultipliers) {
      CopyTiles<kFormat, kSplits>(args.product, tiles, ring, barriers);
    }
  }
}

// How many blocks share a tile of a matrix by itself, where tiles are few; 1: the depth is not cut.
// Of clusters of four and more not as many run at once as multiprocessors would hold.
int32_t NumSplits(const Launcher& launcher, const QuantizedProduct& product, int64_t num_tiles) {
  const ExpertProduct& tiles = product.tiles;
  if (!product.is_linear || product.swiglu || tiles.shared_rows > kMaxTileTokens) return 1;
  const int64_t stages = CeilDiv(tiles.shared_depth, int64_t{kQuantizedDepth});
  const int64_t sms = launcher.device.num_sms;
  for (const int32_t splits : {8, 4, 2}) {
    const int64_t blocks = splits == 2 ? sms : sms - sms / 11;
    if (num_tiles * splits <= blocks && stages >= 2 * splits) return splits;
  }
  return 1;
}

template <WeightFormat kFormat>
absl::Status LaunchFormat(const Launcher& launcher, const QuantizedProduct& product) {
  const ExpertProduct& tiles = product.tiles;
  // Few tokens leave room for more stages; experts' tokens vary around their mean.
  const int64_t tokens = std::max<int64_t>(
      tiles.num_experts > 0 ? 2 * tiles.num_slots / tiles.num_experts : 0, tiles.shared_rows);
  Args args{.product = product,
            .tile_tokens = tokens <= 32   ? 32
                           : tokens <= 64 ? 64
                                          : kMaxTileTokens};
  constexpr size_t kRoom =
      kMaxSharedBytes - sizeof(TileTable) - sizeof(QuantizedBarriers) - kBoxAlignment;
  const auto stage_bytes =
      static_cast<size_t>(QuantizedRing<kFormat>::StageBytes(args.tile_tokens));
  args.num_stages = std::min(kMaxStages, static_cast<int32_t>(kRoom / stage_bytes));
  const auto launch = [&](auto kernel, int64_t blocks) {
    return Launch(
        launcher, "quantized products", kernel,
        {.grid = dim3(static_cast<uint32_t>(blocks)),
         .threads = kThreads,
         .shared_bytes = stage_bytes * static_cast<size_t>(args.num_stages) + kBoxAlignment,
         .early = true},
        args);
  };
  if constexpr (kFormat == WeightFormat::kFloat8) {
    const int64_t num_tiles = CeilDiv(tiles.shared_columns, int64_t{kQuantizedRows});
    switch (NumSplits(launcher, product, num_tiles)) {
      case 8:
        return launch(QuantizedKernel<kFormat, 8>, 8 * num_tiles);
      case 4:
        return launch(QuantizedKernel<kFormat, 4>, 4 * num_tiles);
      case 2:
        return launch(QuantizedKernel<kFormat, 2>, 2 * num_tiles);
      default:
        break;
    }
  }
  return launch(QuantizedKernel<kFormat, 1>, launcher.device.num_sms);
}

MatrixShape ShapeOf(const StoredMatrix& matrix, int64_t count, int64_t stack_stride) {
  const int64_t row_bytes = matrix.dtype == DType::kFloat8E4m3 ? matrix.cols : matrix.cols / 2;
  return {matrix.data, matrix.rows, row_bytes, row_bytes, count, stack_stride};
}

}  // namespace

bool CanMapQuantized(const StoredMatrix& matrix, int64_t count, int64_t stack_stride) {
  const auto format = StreamFormatOf(matrix);
  return ((format == WeightFormat::kFloat8 && matrix.cols % 16 == 0) ||
          (format == WeightFormat::kFloat4 && matrix.cols % 32 == 0)) &&
         CanMapBytes(ShapeOf(matrix, count, stack_stride));
}

absl::StatusOr<CUtensorMap> MapQuantized(const StoredMatrix& matrix, int64_t count,
                                         int64_t stack_stride) {
  return MakeByteMap(ShapeOf(matrix, count, stack_stride), matrix.dtype == DType::kFloat8E4m3
                                                               ? RowBytesOf(WeightFormat::kFloat8)
                                                               : RowBytesOf(WeightFormat::kFloat4));
}

absl::Status MultiplyQuantized(const Launcher& launcher, const QuantizedProduct& product) {
  return product.format == WeightFormat::kFloat8
             ? LaunchFormat<WeightFormat::kFloat8>(launcher, product)
             : LaunchFormat<WeightFormat::kFloat4>(launcher, product);
}

absl::Status MultiplyQuantizedExperts(const Launcher& launcher, const QuantizedProduct& product,
                                      ExpertFormats formats) {
  const auto multiply = [&](QuantizedProduct part, WeightFormat format) {
    part.format = format;
    part.out_order = part.swiglu ? format : WeightFormat::kBfloat16;
    return MultiplyQuantized(launcher, part);
  };
  if (RoutedFormat(formats) == SharedFormat(formats)) {
    return multiply(product, RoutedFormat(formats));
  }
  QuantizedProduct routed = product, shared = product;
  routed.tiles.shared_rows = 0;
  shared.tiles.num_experts = 0;
  RETURN_IF_ERROR(multiply(routed, RoutedFormat(formats)));
  return product.tiles.shared_rows > 0 ? multiply(shared, SharedFormat(formats)) : absl::OkStatus();
}

}  // namespace kernels::cuda

#include "kernels/cuda/quantized_products.h"

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
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

constexpr int32_t kThreads = 3 * kWarpgroupThreads;  // the last ones copy

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

  __device__ void Store(int32_t token, float value) const {
    if (to == nullptr) return;
    const int64_t at = token * stride;
    if (rounds) {
      static_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(PackBfloat16(value, 0));
    } else {
      static_cast<float*>(to)[at] = residual != nullptr ? value + residual[at] : value;
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

template <WeightFormat kFormat, int32_t kTokens>
__device__ void MultiplyTile(const QuantizedProduct& product, QuantizedRing<kFormat>& ring,
                             QuantizedBarriers& barriers, const ExpertTile& tile) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const WarpRows rows = RowsOfWarp(warp, product.swiglu);
  const int64_t top = tile.column_begin + rows.top + g;
  const int64_t bottom = product.swiglu ? top : top + 8;
  const StageScales<kFormat> scales(product, tile, top, bottom, product.swiglu);
  const auto num_stages =
      static_cast<int32_t>(CeilDiv(DepthOf(product.tiles, tile), int64_t{kQuantizedDepth}));
  float sums[kTokens / 2] = {};
  MultiplyDepth<kFormat, kTokens>(ring, barriers, rows, scales, num_stages, sums);
  const OutputColumn top_column = FindColumn(product, tile, top);
  const OutputColumn bottom_column = FindColumn(product, tile, bottom);
#pragma unroll
  for (int32_t j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int32_t c = 0; c < 2; ++c) {
      const int32_t token = 8 * j + 2 * t + c;
      if (token >= tile.num_rows) continue;
      const float a = sums[4 * j + c], b = sums[4 * j + 2 + c];
      if (product.swiglu) {
        top_column.Store(token, SwiGlu(a, b, product.tiles.swiglu_limit));
      } else {
        top_column.Store(token, a);
        bottom_column.Store(token, b);
      }
    }
  }
}

// A block's tiles: every gridDim.x-th.  Half of a tile's weight rows are up rows with SwiGLU.
class BlockTiles {
 public:
  __device__ BlockTiles(const Args& args, const TileTable& table)
      : swiglu_(args.product.swiglu),
        half_(args.product.tiles, args.tile_tokens, table),
        whole_(args.product.tiles, args.tile_tokens, table) {}

  template <typename Take>
  __device__ void ForEach(Take take) const {
    const int32_t num_turns = swiglu_ ? half_.num_turns() : whole_.num_turns();
    for (auto turn = static_cast<int32_t>(blockIdx.x); turn < num_turns;
         turn += static_cast<int32_t>(gridDim.x)) {
      take(swiglu_ ? half_.TileAt(turn) : whole_.TileAt(turn));
    }
  }

 private:
  const bool swiglu_;
  const TileOrder<kQuantizedRows / 2> half_;
  const TileOrder<kQuantizedRows> whole_;
};

template <WeightFormat kFormat>
__device__ void MultiplyTiles(const QuantizedProduct& product, const BlockTiles& tiles,
                              QuantizedRing<kFormat>& ring, QuantizedBarriers& barriers) {
  tiles.ForEach([&](const ExpertTile& tile) {
    if (tile.num_rows <= 16) {
      MultiplyTile<kFormat, 16>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 32) {
      MultiplyTile<kFormat, 32>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 64) {
      MultiplyTile<kFormat, 64>(product, ring, barriers, tile);
    } else if (tile.num_rows <= 96) {
      MultiplyTile<kFormat, 96>(product, ring, barriers, tile);
    } else {
      MultiplyTile<kFormat, kMaxTileTokens>(product, ring, barriers, tile);
    }
  });
}

// One thread's work.
template <WeightFormat kFormat>
__device__ void CopyTiles(const QuantizedProduct& product, const BlockTiles& tiles,
                          QuantizedRing<kFormat>& ring, QuantizedBarriers& barriers) {
  const ExpertProduct& all = product.tiles;
  tiles.ForEach([&](const ExpertTile& tile) {
    const bool is_shared = tile.is_shared();
    const CUtensorMap* first = is_shared ? &all.shared_first : &all.first;
    const CUtensorMap* second = is_shared ? &all.shared_second : &all.second;
    const CUtensorMap* tokens = is_shared ? &all.shared_tokens : &all.tokens;
    const int32_t expert = max(tile.expert, 0);
    const auto depth = static_cast<int32_t>(DepthOf(all, tile));
    const int32_t boxes = CeilDiv(tile.num_rows, kTokenStep);
    for (int32_t k = 0; k < depth; k += kQuantizedDepth, ring.Advance()) {
      Barrier* full = &barriers.full[ring.stage()];
      WaitFor(&barriers.empty[ring.stage()], ring.parity() ^ 1);
      ArriveAndExpect(
          full, static_cast<uint32_t>(QuantizedRing<kFormat>::StageBytes(boxes * kTokenStep)));
      constexpr int32_t kRowBytes = RowBytesOf(kFormat);
      const int32_t byte = k / kQuantizedDepth * kRowBytes;
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

// Grid: as many blocks as run at a time.
template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1) QuantizedKernel(const __grid_constant__ Args args) {
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
  const BlockTiles tiles(args, table);
  QuantizedRing<kFormat> ring(&AlignedShared<std::byte>(), args.tile_tokens, args.num_stages);
  if (threadIdx.x < kQuantizedWarps * kWarpSize) {
    TakeRegisters<232>();
    MultiplyTiles<kFormat>(args.product, tiles, ring, barriers);
  } else {
    GiveRegisters<40>();
    if (threadIdx.x == kQuantizedWarps * kWarpSize) {
      CopyTiles<kFormat>(args.product, tiles, ring, barriers);
    }
  }
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
  return Launch(launcher, "quantized products", QuantizedKernel<kFormat>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kThreads,
                 .shared_bytes = stage_bytes * static_cast<size_t>(args.num_stages) + kBoxAlignment,
                 .early = true},
                args);
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

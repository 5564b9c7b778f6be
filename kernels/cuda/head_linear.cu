#include <cstring>
#include <vector>

#include "kernels/cuda/head_stream.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tile_product.cuh"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

// W of all heads: data [heads, n, k]; scales stay those of the tensor that the heads were cut from.
struct HeadMatrices {
  StoredMatrix stored = {};  // rows: heads * n, cols: k
  int64_t n = 0;
  int64_t k = 0;
  int64_t head_rows = 0;  // of the tensor
  int64_t row_begin = 0;
  bool transpose = false;
};

class CudaPackedHeadLinear final : public PackedHeadLinear {
 public:
  CudaPackedHeadLinear(int32_t num_heads, const HeadMatrices& matrices,
                       std::unique_ptr<DeviceBuffer> memory)
      : PackedHeadLinear(num_heads, matrices.n, matrices.k),
        matrices_(matrices),
        memory_(std::move(memory)) {}

  const HeadMatrices& matrices() const { return matrices_; }

 private:
  HeadMatrices matrices_;
  std::unique_ptr<DeviceBuffer> memory_;
};

__device__ float LoadWeight(const HeadMatrices& w, int64_t head, int64_t n, int64_t k) {
  const StoredMatrix& stored = w.stored;
  const float value = LoadElement(stored.data, stored.dtype, (head * w.n + n) * w.k + k);
  if (stored.scales == nullptr) return value;
  const int64_t row = head * w.head_rows + w.row_begin + (w.transpose ? k : n);
  const int64_t col = w.transpose ? n : k;
  const int64_t scale =
      row / stored.scale_block_rows * stored.scale_cols + col / stored.scale_block_cols;
  return value * LoadElement(stored.scales, stored.scale_dtype, scale);
}

struct HeadLinearArgs {
  HeadMatrices weight;
  int32_t rows;
  const float* input;
  int64_t input_row_stride;
  int64_t input_head_stride;
  float* output;
  uint16_t* rounded_output;
  int64_t output_row_stride;
  int64_t output_head_stride;
};

// Grid: column tiles, row tiles, heads.
__global__ void __launch_bounds__(kTileThreads) HeadLinearKernel(HeadLinearArgs args) {
  __shared__ TileShared shared;
  const int64_t column_begin = int64_t{blockIdx.x} * kTileColumns;
  const int64_t row_begin = int64_t{blockIdx.y} * kTileRows;
  const int64_t head = blockIdx.z;
  const auto load_a = [&](int32_t r, int64_t k) {
    return row_begin + r < args.rows ? args.input[(row_begin + r) * args.input_row_stride +
                                                  head * args.input_head_stride + k]
                                     : 0.0f;
  };
  const auto load_w = [&](int32_t c, int64_t k) {
    return column_begin + c < args.weight.n ? LoadWeight(args.weight, head, column_begin + c, k)
                                            : 0.0f;
  };
  const TileSums sums = MultiplyTile(shared, args.weight.k, load_a, load_w);
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t j = 0; j < 4; ++j) {
      const int64_t row = row_begin + TileRow(i), column = column_begin + TileColumn(j);
      if (row < args.rows && column < args.weight.n) {
        StoreElement(args.output, args.rounded_output,
                     row * args.output_row_stride + head * args.output_head_stride + column,
                     sums.value[i][j]);
      }
    }
  }
}

// The slice of every head as [n, k], one after the other.
std::vector<std::byte> CutHeads(const WeightTensor& tensor, const HeadSlice& slice) {
  const int64_t element_bytes = DTypeBits(tensor.dtype) / 8;
  const int64_t head_bytes = slice.row_count * tensor.cols * element_bytes;
  std::vector<std::byte> data(static_cast<size_t>(slice.num_heads * head_bytes));
  for (int64_t head = 0; head < slice.num_heads; ++head) {
    const std::byte* from =
        static_cast<const std::byte*>(tensor.data) +
        (head * slice.head_rows + slice.row_begin) * tensor.cols * element_bytes;
    std::byte* to = data.data() + head * head_bytes;
    if (!slice.transpose) {
      std::memcpy(to, from, static_cast<size_t>(head_bytes));
      continue;
    }
    for (int64_t row = 0; row < slice.row_count; ++row) {
      for (int64_t col = 0; col < tensor.cols; ++col) {
        std::memcpy(to + (col * slice.row_count + row) * element_bytes,
                    from + (row * tensor.cols + col) * element_bytes,
                    static_cast<size_t>(element_bytes));
      }
    }
  }
  return data;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedHeadLinear>> PackHeadLinear(const WeightTensor& tensor,
                                                                 const HeadSlice& slice) {
  RETURN_IF_ERROR(CheckStored(tensor));
  RETURN_IF_ERROR(CheckHeadSlice(tensor, slice));
  if (tensor.dtype == DType::kFloat4E2m1) {
    return absl::InvalidArgumentError("no cuda kernel for per-head weights of dtype float4_e2m1");
  }
  const std::vector<std::byte> data = CutHeads(tensor, slice);
  HeadMatrices matrices{.n = slice.transpose ? tensor.cols : slice.row_count,
                        .k = slice.transpose ? slice.row_count : tensor.cols,
                        .head_rows = slice.head_rows,
                        .row_begin = slice.row_begin,
                        .transpose = slice.transpose};
  MatrixUploader uploader;
  uploader.Add(tensor, data.data(), slice.num_heads * matrices.n, matrices.k);
  ASSIGN_OR_RETURN(MatrixUploader::Result uploaded, uploader.Upload());
  matrices.stored = uploaded.matrices[0];
  return std::make_unique<CudaPackedHeadLinear>(slice.num_heads, matrices,
                                                std::move(uploaded.memory));
}

const uint16_t* Bfloat16Heads(const PackedHeadLinear& weight) {
  const StoredMatrix& stored = static_cast<const CudaPackedHeadLinear&>(weight).matrices().stored;
  return stored.dtype == DType::kBfloat16 && stored.scales == nullptr
             ? static_cast<const uint16_t*>(stored.data)
             : nullptr;
}

absl::Status HeadLinear(const Launcher& launcher, const HeadLinearParams& params) {
  FERRY_CHECK(params.weight != nullptr);
  const auto& weight = static_cast<const CudaPackedHeadLinear&>(*params.weight);
  RETURN_IF_ERROR(CheckHeadLinear(params));
  const uint16_t* heads = Bfloat16Heads(weight);
  if (launcher.device.bfloat16 && heads != nullptr && CanStreamHeads(params)) {
    return StreamHeadLinear(launcher, params, heads);
  }
  const HeadLinearArgs args{.weight = weight.matrices(),
                            .rows = params.num_rows,
                            .input = params.input,
                            .input_row_stride = params.input_row_stride,
                            .input_head_stride = params.input_head_stride,
                            .output = params.output,
                            .rounded_output = params.rounded_output,
                            .output_row_stride = params.output_row_stride,
                            .output_head_stride = params.output_head_stride};
  const dim3 grid(static_cast<uint32_t>(CeilDiv(args.weight.n, int64_t{kTileColumns})),
                  static_cast<uint32_t>(CeilDiv(params.num_rows, kTileRows)),
                  static_cast<uint32_t>(weight.num_heads()));
  return Launch(launcher, "head_linear", HeadLinearKernel, {.grid = grid, .threads = kTileThreads},
                args);
}

}  // namespace kernels::cuda

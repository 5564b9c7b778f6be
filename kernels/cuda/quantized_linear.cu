#include "kernels/cuda/quantized_linear.h"

#include "kernels/cuda/fragment_order.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/quantized_products.h"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kValues = 8;  // that a thread takes at a time

struct OrderArgs {
  const void* input = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;
  int64_t columns = 0;  // a multiple of kValues
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  uint16_t* out = nullptr;  // [rows, columns]
};

// out <- the input, normed if there is a norm, in bf16 and in the order of fragment_order.cuh.  One
// block a row.
__global__ void __launch_bounds__(kThreads) OrderRowsKernel(OrderArgs args) {
  __shared__ double scratch[33];
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  const int64_t step = kValues * kThreads;
  const auto load = [&](int64_t k, float(&values)[kValues]) {
    const int64_t at = row * args.row_stride + k;
    if (args.dtype == DType::kFloat32) {
      const auto* from =
          reinterpret_cast<const float4*>(static_cast<const float*>(args.input) + at);
      const float4 a = from[0], b = from[1];
      const float all[kValues] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int32_t i = 0; i < kValues; ++i) values[i] = all[i];
      return;
    }
#pragma unroll
    for (int32_t i = 0; i < kValues; ++i) values[i] = LoadElement(args.input, args.dtype, at + i);
  };
  float inverse = 1;
  if (args.norm_weight != nullptr) {
    double sum = 0;
    for (int64_t k = kValues * int64_t{threadIdx.x}; k < args.columns; k += step) {
      float values[kValues];
      load(k, values);
#pragma unroll
      for (int32_t i = 0; i < kValues; ++i) sum += static_cast<double>(values[i]) * values[i];
    }
    sum = BlockSum(sum, scratch);
    inverse = static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(args.columns) + static_cast<double>(args.norm_eps)));
  }
  for (int64_t k = kValues * int64_t{threadIdx.x}; k < args.columns; k += step) {
    float values[kValues];
    load(k, values);
    if (args.norm_weight != nullptr) {
#pragma unroll
      for (int32_t i = 0; i < kValues; ++i)
        values[i] = values[i] * inverse * args.norm_weight[k + i];
    }
    StoreOrdered(
        WeightFormat::kFloat8, args.out + row * args.columns, k,
        make_uint4(PackBfloat16(values[0], values[1]), PackBfloat16(values[2], values[3]),
                   PackBfloat16(values[4], values[5]), PackBfloat16(values[6], values[7])));
  }
}

// Rows [begin, begin + count) of a matrix; `begin` begins a block of scales.
StoredMatrix RowsOf(const StoredMatrix& matrix, int64_t begin, int64_t count) {
  StoredMatrix rows = matrix;
  rows.rows = count;
  rows.data = static_cast<const uint8_t*>(matrix.data) + begin * matrix.cols;
  rows.scales = static_cast<const float*>(matrix.scales) +
                begin / matrix.scale_block_rows * matrix.scale_cols;
  return rows;
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool CanRunQuantized(const LinearParams& params, const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  return weight.num_parts == 1 && StreamFormatOf(matrix) == WeightFormat::kFloat8 &&
         CanMapQuantized(matrix, 1, 0) &&
         (!swiglu || matrix.rows / 2 % matrix.scale_block_rows == 0) &&
         params.residual_in == nullptr && params.residual_out == nullptr &&
         params.workspace != nullptr &&
         (params.input.dtype == DType::kBfloat16 ||
          (params.input.dtype == DType::kFloat32 && params.input.row_stride % 4 == 0 &&
           IsAligned(params.input.data)));
}

absl::Status QuantizedLinear(const Launcher& launcher, const LinearParams& params,
                             const MatrixStack& weight) {
  const StoredMatrix& matrix = weight.parts[0];
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  const int64_t columns = swiglu ? matrix.rows / 2 : matrix.rows;
  auto* ordered = reinterpret_cast<uint16_t*>(params.workspace);
  RETURN_IF_ERROR(Launch(
      launcher, "quantized linear prologue", OrderRowsKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      OrderArgs{.input = params.input.data,
                .dtype = params.input.dtype,
                .row_stride = params.input.row_stride,
                .columns = matrix.cols,
                .norm_weight = params.norm_weight,
                .norm_eps = params.norm_eps,
                .out = ordered}));
  const StoredMatrix first = RowsOf(matrix, 0, columns);
  const StoredMatrix second = swiglu ? RowsOf(matrix, columns, columns) : first;
  const auto scales = [](const StoredMatrix& of) {
    return QuantizedScales{static_cast<const std::byte*>(of.scales), 0};
  };
  QuantizedProduct product;
  product.format = WeightFormat::kFloat8;
  product.shared_first = scales(first);
  product.shared_second = scales(second);
  product.swiglu = swiglu;
  product.is_linear = true;
  product.output = MakeLinearOutput(params);
  product.tiles.shared_rows = params.num_rows;
  product.tiles.shared_depth = matrix.cols;
  product.tiles.shared_columns = columns;
  product.tiles.swiglu_limit = params.swiglu_limit;
  ASSIGN_OR_RETURN(product.tiles.shared_first, MapQuantized(first, 1, 0));
  ASSIGN_OR_RETURN(product.tiles.shared_second, MapQuantized(second, 1, 0));
  ASSIGN_OR_RETURN(
      product.tiles.shared_tokens,
      MakeTensorMap({ordered, params.num_rows, matrix.cols, matrix.cols}, {.rows = kTokenStep}));
  return MultiplyQuantized(launcher, product);
}

}  // namespace kernels::cuda

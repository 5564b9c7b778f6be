#include "absl/strings/str_cat.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_output.cuh"
#include "kernels/cuda/quantized_linear.h"
#include "kernels/cuda/skinny_linear.h"
#include "kernels/cuda/split_gemm.h"
#include "kernels/cuda/tile_product.cuh"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kPrepareThreads = 256;

struct PrepareArgs {
  Activation input;
  const float* residual_in;
  float* residual_out;
  const float* norm_weight;
  float norm_eps;
  int64_t columns;
  float* out;  // [rows, columns]
};

// One block a row.
__global__ void __launch_bounds__(kPrepareThreads) PrepareRowsKernel(PrepareArgs args) {
  __shared__ double scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t at = row * args.input.row_stride;
  float* out = args.out + row * args.columns;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < args.columns; i += kPrepareThreads) {
    float x = LoadElement(args.input.data, args.input.dtype, at + i);
    if (args.residual_in != nullptr) x += args.residual_in[at + i];
    if (args.residual_out != nullptr) args.residual_out[at + i] = x;
    out[i] = x;
    sum += static_cast<double>(x) * x;
  }
  if (args.norm_weight == nullptr) return;
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(args.columns) + static_cast<double>(args.norm_eps)));
  for (int64_t i = threadIdx.x; i < args.columns; i += kPrepareThreads) {
    out[i] = out[i] * inverse * args.norm_weight[i];
  }
}

struct LinearArgs {
  MatrixStack weight;
  const void* input;  // [rows, depth]
  DType input_dtype;
  int64_t input_row_stride;
  int32_t rows;
  int64_t columns;  // of the output
  int64_t depth;
  LinearEpilogue epilogue;
  float swiglu_limit;
  LinearOutput output;
};

// Grid: column tiles, row tiles.
__global__ void __launch_bounds__(kTileThreads) LinearKernel(LinearArgs args) {
  __shared__ TileShared shared;
  const int64_t column_begin = int64_t{blockIdx.x} * kTileColumns;
  const int64_t row_begin = int64_t{blockIdx.y} * kTileRows;
  const auto load_a = [&](int32_t r, int64_t k) {
    if (row_begin + r >= args.rows) return 0.0f;
    return LoadElement(args.input, args.input_dtype, (row_begin + r) * args.input_row_stride + k);
  };
  const auto load_w = [&](int32_t c, int64_t k) {
    return column_begin + c < args.columns ? LoadWeight(args.weight, column_begin + c, k) : 0.0f;
  };
  TileSums sums = MultiplyTile(shared, args.depth, load_a, load_w);
  if (args.epilogue == LinearEpilogue::kSwiGlu) {
    const auto load_up = [&](int32_t c, int64_t k) {
      return column_begin + c < args.columns
                 ? LoadWeight(args.weight, args.columns + column_begin + c, k)
                 : 0.0f;
    };
    const TileSums up = MultiplyTile(shared, args.depth, load_a, load_up);
    for (int32_t i = 0; i < 2; ++i) {
      for (int32_t j = 0; j < 4; ++j) {
        sums.value[i][j] = SwiGlu(sums.value[i][j], up.value[i][j], args.swiglu_limit);
      }
    }
  }
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t j = 0; j < 4; ++j) {
      const int64_t row = row_begin + TileRow(i), column = column_begin + TileColumn(j);
      if (row < args.rows && column < args.columns)
        Store(args.output, row, column, sums.value[i][j]);
    }
  }
}

absl::Status CheckSupported(const LinearParams& params) {
  const DType dtype = params.input.dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kBfloat16 && dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("no cuda kernel for activations of dtype ", std::string(DTypeName(dtype))));
  }
  if (params.input.scales != nullptr) {
    return absl::InvalidArgumentError("no cuda kernel for activations with scales");
  }
  if (params.outputs.size() > kMaxSegments) {
    return absl::InvalidArgumentError(absl::StrCat("linear into ", params.outputs.size(),
                                                   " output segments, at most ", kMaxSegments));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(absl::Span<const WeightTensor> stacked) {
  if (stacked.empty()) return absl::InvalidArgumentError("no weight tensor to pack");
  MatrixUploader uploader;
  for (const WeightTensor& tensor : stacked) {
    RETURN_IF_ERROR(CheckStored(tensor));
    if (tensor.cols != stacked[0].cols) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stacked weight tensors have ", stacked[0].cols, " and ", tensor.cols, " columns"));
    }
    uploader.Stack(tensor);
  }
  ASSIGN_OR_RETURN(MatrixUploader::Result uploaded, uploader.Upload());
  MatrixStack stack;
  if (uploaded.matrices.size() > kMaxStacked) {
    return absl::InvalidArgumentError(absl::StrCat("a stack of ", uploaded.matrices.size(),
                                                   " different weight tensors, at most ",
                                                   kMaxStacked));
  }
  int64_t rows = 0;
  for (const StoredMatrix& matrix : uploaded.matrices) {
    rows += matrix.rows;
    stack.parts[stack.num_parts] = matrix;
    stack.row_end[stack.num_parts++] = rows;
  }
  return std::make_unique<CudaPackedLinear>(stack, std::move(uploaded.memory), stacked[0].cols);
}

namespace {

// Whether the outputs of every matrix of the stack are segments of its own.
bool HasOwnSegments(const LinearParams& params, const MatrixStack& stack) {
  int64_t columns = 0;
  size_t next = 0;
  for (int32_t i = 0; i < stack.num_parts; ++i) {
    while (next < params.outputs.size() && columns < stack.row_end[i]) {
      columns += params.outputs[next++].columns;
    }
    if (columns != stack.row_end[i]) return false;
  }
  return params.epilogue == LinearEpilogue::kNone && params.residual_in == nullptr &&
         params.residual_out == nullptr;
}

// One matrix after the other: the fast products take no more than one.
absl::Status LinearOneByOne(const Launcher& launcher, const LinearParams& params,
                            const MatrixStack& stack) {
  absl::Span<const OutputSegment> outputs = params.outputs;
  for (int32_t i = 0; i < stack.num_parts; ++i) {
    const StoredMatrix& matrix = stack.parts[i];
    MatrixStack one;
    one.num_parts = 1;
    one.parts[0] = matrix;
    one.row_end[0] = matrix.rows;
    const CudaPackedLinear weight(one, nullptr, matrix.cols);
    size_t count = 0;
    for (int64_t columns = 0; columns < matrix.rows; ++count) columns += outputs[count].columns;
    LinearParams part = params;
    part.weight = &weight;
    part.outputs = outputs.first(count);
    RETURN_IF_ERROR(Linear(launcher, part));
    outputs.remove_prefix(count);
  }
  return absl::OkStatus();
}

}  // namespace

bool LinearRoundsInput(const Device& device, const PackedLinear& weight, int32_t num_rows) {
  const MatrixStack& stack = static_cast<const CudaPackedLinear&>(weight).stack();
  const StoredMatrix& matrix = stack.parts[0];
  return device.bfloat16 && num_rows > kMaxSkinnyRows && stack.num_parts == 1 &&
         matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr && matrix.cols % 8 == 0;
}

int64_t LinearWorkspaceBytes(int32_t max_rows, int64_t max_in_features) {
  return max_rows * max_in_features * static_cast<int64_t>(sizeof(float));
}

absl::Status PrepareRows(const Launcher& launcher, const LinearParams& params, int64_t in_features,
                         float* out) {
  const PrepareArgs args{.input = params.input,
                         .residual_in = params.residual_in,
                         .residual_out = params.residual_out,
                         .norm_weight = params.norm_weight,
                         .norm_eps = params.norm_eps,
                         .columns = in_features,
                         .out = out};
  return Launch(launcher, "linear prologue", PrepareRowsKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kPrepareThreads},
                args);
}

absl::Status Linear(const Launcher& launcher, const LinearParams& params) {
  FERRY_CHECK(params.weight != nullptr);
  const auto& weight = static_cast<const CudaPackedLinear&>(*params.weight);
  RETURN_IF_ERROR(CheckLinear(params));
  RETURN_IF_ERROR(CheckSupported(params));
  if (params.num_rows == 0) return absl::OkStatus();
  if (launcher.device.bfloat16 && weight.stack().num_parts > 1 &&
      HasOwnSegments(params, weight.stack())) {
    return LinearOneByOne(launcher, params, weight.stack());
  }
  if (launcher.device.bfloat16 && CanRunSkinny(params, weight.stack())) {
    return SkinnyLinear(launcher, params, weight.stack());
  }
  if (launcher.device.bfloat16 && CanSplitGemm(launcher, params, weight.stack())) {
    return SplitGemm(launcher, params, weight.stack());
  }
  if (launcher.device.bfloat16 && CanRunGemm(params, weight.stack())) {
    return Gemm(launcher, params, weight.stack());
  }
  if (launcher.device.bfloat16 && CanRunQuantized(params, weight.stack())) {
    return QuantizedLinear(launcher, params, weight.stack());
  }
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  LinearArgs args{.weight = weight.stack(),
                  .input = params.input.data,
                  .input_dtype = params.input.dtype,
                  .input_row_stride = params.input.row_stride,
                  .rows = params.num_rows,
                  .columns = swiglu ? weight.out_features() / 2 : weight.out_features(),
                  .depth = weight.in_features(),
                  .epilogue = params.epilogue,
                  .swiglu_limit = params.swiglu_limit,
                  .output = MakeLinearOutput(params)};
  if (params.residual_in != nullptr || params.residual_out != nullptr ||
      params.norm_weight != nullptr) {
    if (params.workspace == nullptr) {
      return absl::InvalidArgumentError("linear: a prologue needs a workspace on cuda");
    }
    auto* prepared = reinterpret_cast<float*>(params.workspace);
    RETURN_IF_ERROR(PrepareRows(launcher, params, args.depth, prepared));
    args.input = prepared;
    args.input_dtype = DType::kFloat32;
    args.input_row_stride = args.depth;
  }
  const dim3 grid(static_cast<uint32_t>(CeilDiv(args.columns, int64_t{kTileColumns})),
                  static_cast<uint32_t>(CeilDiv(params.num_rows, kTileRows)));
  return Launch(launcher, "linear", LinearKernel, {.grid = grid, .threads = kTileThreads}, args);
}

}  // namespace kernels::cuda

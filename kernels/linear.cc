#include "kernels/linear.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kernels {

absl::Status CheckLinear(const LinearParams& params) {
  const PackedLinear& weight = *params.weight;
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("linear over ", params.num_rows, " rows"));
  }
  if (params.num_rows > 1 && params.input.row_stride < weight.in_features()) {
    return absl::InvalidArgumentError(absl::StrCat("input row stride ", params.input.row_stride,
                                                   " < in_features ", weight.in_features()));
  }
  const bool swiglu = params.epilogue == LinearEpilogue::kSwiGlu;
  if (swiglu && weight.out_features() % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "swiglu needs as many gate rows as up rows; weight has ", weight.out_features(), " rows"));
  }
  const int64_t want = swiglu ? weight.out_features() / 2 : weight.out_features();
  int64_t columns = 0;
  for (const OutputSegment& segment : params.outputs) {
    if (segment.columns < 0 || (segment.data == nullptr && segment.columns > 0) ||
        (params.num_rows > 1 && segment.row_stride < segment.columns)) {
      return absl::InvalidArgumentError(absl::StrCat("output segment of ", segment.columns,
                                                     " columns, row stride ", segment.row_stride,
                                                     segment.data == nullptr ? ", no data" : ""));
    }
    if (segment.dtype != DType::kFloat32 &&
        (segment.dtype != DType::kBfloat16 || params.epilogue == LinearEpilogue::kResidual)) {
      return absl::InvalidArgumentError(
          absl::StrCat("output segment of dtype ", std::string(DTypeName(segment.dtype)),
                       params.epilogue == LinearEpilogue::kResidual ? " with a residual" : ""));
    }
    columns += segment.columns;
  }
  if (columns != want) {
    return absl::InvalidArgumentError(
        absl::StrCat("output segments hold ", columns, " columns, the product has ", want));
  }
  if (params.epilogue == LinearEpilogue::kResidual &&
      (params.epilogue_residual == nullptr || params.outputs.size() != 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the residual epilogue needs a residual and one output segment, has ",
                     params.outputs.size(), params.epilogue_residual == nullptr ? ", none" : ""));
  }
  return absl::OkStatus();
}

absl::Status CheckHeadSlice(const WeightTensor& tensor, const HeadSlice& slice) {
  if (slice.num_heads <= 0 || slice.head_rows <= 0 || slice.row_begin < 0 || slice.row_count <= 0 ||
      slice.row_begin + slice.row_count > slice.head_rows ||
      slice.num_heads * slice.head_rows != tensor.rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head slice of rows ", slice.row_begin, " + ", slice.row_count, " in ", slice.num_heads,
        " heads of ", slice.head_rows, " rows does not fit a tensor of ", tensor.rows, " rows"));
  }
  return absl::OkStatus();
}

absl::Status CheckHeadLinear(const HeadLinearParams& params) {
  const PackedHeadLinear& weight = *params.weight;
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("head linear over ", params.num_rows, " rows"));
  }
  if (weight.num_heads() > 1 && (params.input_head_stride < weight.in_features() ||
                                 params.output_head_stride < weight.out_features())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head strides ", params.input_head_stride, " (input) and ", params.output_head_stride,
        " (output) for heads of ", weight.in_features(), " and ", weight.out_features()));
  }
  if ((params.output == nullptr) == (params.rounded_output == nullptr)) {
    return absl::InvalidArgumentError("head linear needs one of output and rounded_output");
  }
  return absl::OkStatus();
}

}  // namespace kernels

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

// As tests/kernels/linear_test.cc: a float sum errs by a few roundings of its absolute sum.
double SumBound(const TestWeight& weight, const std::vector<float>& input, int64_t num_rows) {
  double largest = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t n = 0; n < weight.tensor.rows; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < weight.tensor.cols; ++k) {
        sum += std::abs(input[static_cast<size_t>(r * weight.tensor.cols + k)] * weight.at(n, k));
      }
      largest = std::max(largest, sum);
    }
  }
  return 8 * 0x1p-24 * largest;
}

class CudaLinearTest : public DeviceTest, public ::testing::WithParamInterface<WeightKind> {
 protected:
  std::vector<float> Run(Backend& backend, const PackedLinear& weight, float* input, float* out,
                         int32_t num_rows) {
    const OutputSegment segment = {out, weight.out_features(), weight.out_features()};
    const absl::Status status =
        backend.Linear({}, {.weight = &weight,
                            .num_rows = num_rows,
                            .input = {.data = input, .row_stride = weight.in_features()},
                            .outputs = {&segment, 1}});
    EXPECT_TRUE(status.ok()) << status;
    const size_t size = static_cast<size_t>(num_rows * weight.out_features());
    return &backend == host_.get() ? std::vector<float>(out, out + size) : Download(out, size);
  }
};

TEST_P(CudaLinearTest, EqualsTheCpu) {
  struct Shape {
    int64_t n, k;
    int32_t rows;
  };
  for (const Shape& shape : {Shape{1, 1, 1},
                             {1, 300, 2},
                             {33, 1, 3},
                             {65, 7, 4},
                             {64, 128, 5},
                             {100, 129, 33},
                             {200, 515, 64}}) {
    SCOPED_TRACE(testing::Message() << shape.n << " x " << shape.k << ", " << shape.rows);
    const TestWeight weight = MakeWeight(GetParam(), shape.n, GetParam().Columns(shape.k), 1);
    std::vector<float> input = RandomFloats(shape.rows * weight.tensor.cols, 2);
    std::vector<float> out(static_cast<size_t>(shape.rows * shape.n), kNan);
    const auto on_device = device_->PackLinear({weight.tensor});
    const auto on_host = host_->PackLinear({weight.tensor});
    ASSERT_TRUE(on_device.ok()) << on_device.status();
    EXPECT_TRUE(AllClose(Run(*device_, **on_device, Upload(input), Upload(out), shape.rows),
                         Run(*host_, **on_host, input.data(), out.data(), shape.rows),
                         {.abs = SumBound(weight, input, shape.rows), .cosine = 1e-10}));
  }
}

TEST_P(CudaLinearTest, ARowHasTheSameBitsInEveryBatch) {
  constexpr int64_t kN = 70, kK = 334;
  constexpr int32_t kRows = 40;
  const TestWeight weight = MakeWeight(GetParam(), kN, kK, 3);
  const auto packed = device_->PackLinear({weight.tensor});
  float* input = Upload(RandomFloats(kRows * kK, 4));
  float* out = Upload(std::vector<float>(kRows * kN, kNan));
  const std::vector<float> together = Run(*device_, **packed, input, out, kRows);
  EXPECT_TRUE(BitEqual(Run(*device_, **packed, input, out, kRows), together));  // run twice
  for (const int32_t row : {0, 17, 39}) {
    EXPECT_TRUE(BitEqual(Run(*device_, **packed, input + row * kK, out, 1),
                         absl::MakeConstSpan(together).subspan(row * kN, kN)));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CudaLinearTest, ::testing::ValuesIn(AllWeightKinds()),
                         [](const auto& info) { return info.param.name; });

class CudaLinearFormTest : public DeviceTest {};

// q ‖ kv_a: tensors of different dtypes and odd sizes, scattered over segments that cut elsewhere,
// with everything that a prologue can do, between NaN that is nobody's.
TEST_F(CudaLinearFormTest, PrologueStackAndSegmentsEqualTheCpu) {
  constexpr int64_t kK = 130, kStride = 135;
  constexpr int32_t kRows = 37;
  const TestWeight parts[] = {MakeWeight({"", DType::kFloat8E4m3, 128, 128}, 37, kK, 1),
                              MakeWeight({"", DType::kBfloat16}, 70, kK, 2),
                              MakeWeight({"", DType::kFloat32}, 3, kK, 3)};
  const std::vector<WeightTensor> stack = {parts[0].tensor, parts[1].tensor, parts[2].tensor};
  std::vector<float> input = RandomFloats(kRows * kStride, 4);
  std::vector<float> residual = RandomFloats(kRows * kStride, 5);
  for (int32_t r = 0; r < kRows; ++r) {
    std::fill_n(input.begin() + r * kStride + kK, kStride - kK, kNan);
  }
  const std::vector<float> norm = RandomFloats(kK, 6);
  std::vector<float> a(kRows * 52, kNan), b(kRows * 60, kNan), c(kRows, kNan);

  const auto run = [&](Backend& backend, float* in, float* res, const float* weight_of_norm,
                       float* a, float* b, float* c, std::byte* workspace) {
    const auto packed = backend.PackLinear(stack);
    ASSERT_TRUE(packed.ok()) << packed.status();
    EXPECT_EQ((*packed)->out_features(), 110);
    const OutputSegment segments[] = {{a, 52, 50}, {b, 60, 59}, {c, 1, 1}};
    const absl::Status status = backend.Linear({}, {.weight = packed->get(),
                                                    .num_rows = kRows,
                                                    .input = {.data = in, .row_stride = kStride},
                                                    .residual_in = res,
                                                    .residual_out = res,
                                                    .norm_weight = weight_of_norm,
                                                    .norm_eps = 1e-3f,
                                                    .outputs = segments,
                                                    .workspace = workspace});
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(backend.Synchronize({}).ok());
  };
  float *device_residual = Upload(residual), *device_a = Upload(a), *device_b = Upload(b),
        *device_c = Upload(c);
  run(*device_, Upload(input), device_residual, Upload(norm), device_a, device_b, device_c,
      Workspace(device_->LinearWorkspaceBytes(kRows, kK)));
  run(*host_, input.data(), residual.data(), norm.data(), a.data(), b.data(), c.data(), nullptr);
  const numerics::Tolerance tolerance{.abs = 2e-4, .rel = 1e-5, .cosine = 1e-10};
  EXPECT_TRUE(AllClose(Download(device_a, a.size()), a, tolerance));
  EXPECT_TRUE(AllClose(Download(device_b, b.size()), b, tolerance));
  EXPECT_TRUE(AllClose(Download(device_c, c.size()), c, tolerance));
  EXPECT_TRUE(BitEqual(Download(device_residual, residual.size()), residual));
}

TEST_F(CudaLinearFormTest, EpiloguesEqualTheCpu) {
  constexpr int64_t kK = 96, kHalf = 75;
  constexpr int32_t kRows = 33;
  const TestWeight gate = MakeWeight({"", DType::kBfloat16}, kHalf, kK, 1);
  const TestWeight up = MakeWeight({"", DType::kFloat8E4m3, 32, 32}, kHalf, kK, 2);
  std::vector<float> input = RandomFloats(kRows * kK, 3);
  float* device_input = Upload(input);
  for (const float limit : {0.0f, 7.0f}) {
    std::vector<float> out(kRows * kHalf, kNan);
    float* device_out = Upload(out);
    const auto run = [&](Backend& backend, float* in, float* to) {
      const auto packed = backend.PackLinear({gate.tensor, up.tensor});
      const OutputSegment segment = {to, kHalf, kHalf};
      EXPECT_TRUE(backend
                      .Linear({}, {.weight = packed->get(),
                                   .num_rows = kRows,
                                   .input = {.data = in, .row_stride = kK},
                                   .epilogue = LinearEpilogue::kSwiGlu,
                                   .swiglu_limit = limit,
                                   .outputs = {&segment, 1}})
                      .ok());
      EXPECT_TRUE(backend.Synchronize({}).ok());
    };
    run(*device_, device_input, device_out);
    run(*host_, input.data(), out.data());
    EXPECT_TRUE(AllClose(Download(device_out, out.size()), out, {.abs = 1e-3, .rel = 1e-5}));
  }
  // Residual in place, as the network does it; half-precision input.
  const TestWeight half = MakeWeight({"", DType::kBfloat16}, kRows, kK, 4);
  std::vector<float> out = RandomFloats(kRows * kHalf, 5);
  float* device_out = Upload(out);
  const auto run = [&](Backend& backend, const void* in, float* to) {
    const auto packed = backend.PackLinear({gate.tensor});
    const OutputSegment segment = {to, kHalf, kHalf};
    EXPECT_TRUE(backend
                    .Linear({}, {.weight = packed->get(),
                                 .num_rows = kRows,
                                 .input = {.data = const_cast<void*>(in),
                                           .dtype = DType::kBfloat16,
                                           .row_stride = kK},
                                 .epilogue = LinearEpilogue::kResidual,
                                 .epilogue_residual = to,
                                 .outputs = {&segment, 1}})
                    .ok());
    EXPECT_TRUE(backend.Synchronize({}).ok());
  };
  run(*device_, Upload(half.bytes), device_out);
  run(*host_, half.bytes.data(), out.data());
  EXPECT_TRUE(AllClose(Download(device_out, out.size()), out, {.abs = 2e-5, .rel = 1e-5}));
}

TEST_F(CudaLinearFormTest, RefusesWhatCannotBe) {
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, 4, 8, 1);
  const auto packed = device_->PackLinear({weight.tensor});
  const auto message = [&](LinearParams params) {
    params.weight = packed->get();
    const absl::Status status = device_->Linear({}, params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const OutputSegment segment = {Upload(std::vector<float>(8)), 4, 4};
  LinearParams wrong;
  wrong.num_rows = 1;
  EXPECT_THAT(message(wrong), HasSubstr("hold 0 columns, the product has 4"));
  wrong.input = {.dtype = DType::kFloat8E4m3, .row_stride = 8};
  wrong.outputs = {&segment, 1};
  EXPECT_THAT(message(wrong), HasSubstr("activations of dtype float8"));
  WeightTensor integers = weight.tensor;
  integers.dtype = DType::kInt32;
  EXPECT_THAT(std::string(device_->PackLinear({integers}).status().message()),
              HasSubstr("weights of dtype int32"));
  WeightTensor narrow = weight.tensor;
  narrow.cols = 4;
  EXPECT_THAT(std::string(device_->PackLinear({weight.tensor, narrow}).status().message()),
              HasSubstr("8 and 4 columns"));
  EXPECT_EQ(device_->PackLinear({}).status().code(), absl::StatusCode::kInvalidArgument);
}

// A device that rounds activations to bf16 takes few rows another way.
class CudaRoundingLinearTest : public DeviceTest {
 protected:
  CudaRoundingLinearTest() : DeviceTest(/*bfloat16=*/true) {}

  // Values that rounding does not change.
  static std::vector<float> RoundFloats(int64_t size, uint32_t seed) {
    const TestWeight values = MakeWeight({"", DType::kBfloat16}, 1, size, seed);
    std::vector<float> floats(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) floats[i] = static_cast<float>(values.at(0, i));
    return floats;
  }

  struct Case {
    const TestWeight* weight;  // on top of `below`, if there is that
    int32_t rows;
    LinearEpilogue epilogue = LinearEpilogue::kNone;
    bool norm = false;
    const TestWeight* below = nullptr;
  };
  // q ‖ kv_a into segments of 3 and the rest, between NaN that is nobody's.
  struct Result {
    std::vector<float> first, rest;
  };
  Result Run(Backend& backend, const Case& c, const std::vector<float>& input) {
    const bool on_device = &backend == device_.get();
    std::vector<WeightTensor> stack = {c.weight->tensor};
    if (c.below != nullptr) stack.push_back(c.below->tensor);
    int64_t n = 0;
    for (const WeightTensor& tensor : stack) n += tensor.rows;
    const int64_t k = c.weight->tensor.cols;
    const bool swiglu = c.epilogue == LinearEpilogue::kSwiGlu;
    const int64_t columns = swiglu ? n / 2 : n;
    const auto packed = backend.PackLinear(stack);
    EXPECT_TRUE(packed.ok()) << packed.status();
    const std::vector<float> norm = RandomFloats(k, 77),
                             residual = RandomFloats(c.rows * (columns + 1), 78);
    Result result{std::vector<float>(c.rows * 5, kNan),
                  std::vector<float>(c.rows * (columns + 1), kNan)};
    const auto place = [&](const std::vector<float>& values) {
      return on_device ? Upload(values) : const_cast<float*>(values.data());
    };
    float *first = place(result.first), *rest = place(result.rest);
    const OutputSegment split[] = {{first, 5, 3}, {rest, columns + 1, columns - 3}};
    const OutputSegment whole[] = {{rest, columns + 1, columns}};
    LinearParams params{.weight = packed->get(),
                        .num_rows = c.rows,
                        .input = {.data = place(input), .row_stride = k},
                        .norm_weight = c.norm ? place(norm) : nullptr,
                        .norm_eps = 1e-3f,
                        .epilogue = c.epilogue,
                        .outputs = split};
    if (c.epilogue != LinearEpilogue::kNone) params.outputs = whole;
    if (c.epilogue == LinearEpilogue::kResidual) params.epilogue_residual = place(residual);
    if (on_device) params.workspace = Workspace(backend.LinearWorkspaceBytes(c.rows, k));
    const absl::Status status = backend.Linear({}, params);
    EXPECT_TRUE(status.ok()) << status;
    if (!on_device) return result;
    return {Download(first, result.first.size()), Download(rest, result.rest.size())};
  }
};

// The formats that have kernels of their own.
const WeightKind kRoundingKinds[] = {
    {"bfloat16", DType::kBfloat16},
    {"e4m3_128x128", DType::kFloat8E4m3, 128, 128},
    {"e4m3_128x128_e8m0", DType::kFloat8E4m3, 128, 128, DType::kFloat8E8m0}};

TEST_F(CudaRoundingLinearTest, EqualsTheCpu) {
  struct Shape {
    int64_t n, k;
  };
  for (const WeightKind& kind : kRoundingKinds) {
    // The depth of the longer ones is cut in two, four and eight, evenly or not.
    for (const Shape& shape :
         {Shape{4, 32}, {16, 64}, {50, 288}, {300, 576}, {140, 1104}, {70, 2048}}) {
      const TestWeight weight = MakeWeight(kind, shape.n, shape.k, 1);
      for (const int32_t rows : {1, 7, 8, 9, 16, 17, 40, 100}) {
        SCOPED_TRACE(testing::Message()
                     << kind.name << " " << shape.n << " x " << shape.k << ", " << rows);
        const std::vector<float> input = RoundFloats(rows * shape.k, 2);
        const double bound = SumBound(weight, input, rows);
        for (const LinearEpilogue epilogue :
             {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu, LinearEpilogue::kResidual}) {
          const Case c{&weight, rows, epilogue};
          const Result actual = Run(*device_, c, input), expected = Run(*host_, c, input);
          // silu(gate) * up: an error of either times the other.
          const double scale = epilogue == LinearEpilogue::kSwiGlu ? 2 * bound / 0x1p-21 : 1;
          const numerics::Tolerance tolerance{.abs = bound * scale, .cosine = 1e-9};
          EXPECT_TRUE(AllClose(actual.first, expected.first, tolerance));
          EXPECT_TRUE(AllClose(actual.rest, expected.rest, tolerance));
        }
        // Normed rows are rounded: half a unit of the 8th bit of every factor.
        const Case normed{&weight, rows, LinearEpilogue::kNone, true};
        EXPECT_TRUE(AllClose(Run(*device_, normed, input).rest, Run(*host_, normed, input).rest,
                             {.abs = 0x1p-9 * 3 * static_cast<double>(shape.k), .cosine = 5e-6}));
      }
    }
  }
}

// Two tensors with scales are one matrix if the first ends with a block, and two if not.
TEST_F(CudaRoundingLinearTest, StacksOfBlocksEqualTheCpu) {
  constexpr int64_t kK = 576;
  for (const WeightKind& kind : kRoundingKinds) {
    for (const int64_t first_rows : {256, 200}) {
      const TestWeight first = MakeWeight(kind, first_rows, kK, 1);
      const TestWeight second = MakeWeight(kind, 200, kK, 2);
      for (const int32_t rows : {1, 9}) {
        SCOPED_TRACE(testing::Message() << kind.name << " " << first_rows << ", " << rows);
        const std::vector<float> input = RoundFloats(rows * kK, 3);
        const double bound = std::max(SumBound(first, input, rows), SumBound(second, input, rows));
        const Case c{&first, rows, LinearEpilogue::kNone, false, &second};
        const Result actual = Run(*device_, c, input), expected = Run(*host_, c, input);
        EXPECT_TRUE(AllClose(actual.first, expected.first, {.abs = bound, .cosine = 1e-9}));
        EXPECT_TRUE(AllClose(actual.rest, expected.rest, {.abs = bound, .cosine = 1e-9}));
      }
    }
  }
}

TEST_F(CudaRoundingLinearTest, ARowHasTheSameBitsWhereverItStandsInASmallBatch) {
  constexpr int64_t kN = 70, kK = 576;
  for (const WeightKind& kind : kRoundingKinds) {
    SCOPED_TRACE(kind.name);
    const TestWeight weight = MakeWeight(kind, kN, kK, 3);
    const std::vector<float> input = RandomFloats(16 * kK, 4);
    const Result together = Run(*device_, {&weight, 16, LinearEpilogue::kNone, true}, input);
    const Result again = Run(*device_, {&weight, 16, LinearEpilogue::kNone, true}, input);
    EXPECT_TRUE(BitEqual(again.rest, together.rest));
    for (const int32_t row : {0, 7, 8, 15}) {
      const std::vector<float> one(input.begin() + row * kK, input.begin() + (row + 1) * kK);
      const Result alone = Run(*device_, {&weight, 1, LinearEpilogue::kNone, true}, one);
      EXPECT_TRUE(
          BitEqual(alone.rest, absl::MakeConstSpan(together.rest).subspan(row * (kN + 1), kN + 1)));
    }
  }
}

// Many rows: tiles of 128 x 128 (64 with kSwiGlu), full and not; the depth of one row tile cut in
// two, four and eight; odd segments and even ones; gate rows that end with a block of scales.
TEST_F(CudaRoundingLinearTest, ManyRowsEqualTheCpu) {
  struct Shape {
    int64_t n, k;
    int32_t rows;
  };
  for (const WeightKind& kind : kRoundingKinds) {
    for (const Shape& shape : {Shape{8, 8, 17},
                               {128, 64, 128},
                               {130, 72, 129},
                               {300, 200, 64},
                               {260, 1032, 257},
                               {130, 300, 70},
                               {300, 600, 17},
                               {300, 1032, 128},
                               {512, 208, 150}}) {
      SCOPED_TRACE(testing::Message()
                   << kind.name << " " << shape.n << " x " << shape.k << ", " << shape.rows);
      const TestWeight weight = MakeWeight(kind, shape.n, shape.k, 1);
      const std::vector<float> input = RoundFloats(shape.rows * shape.k, 2);
      const double bound = SumBound(weight, input, shape.rows);
      for (const LinearEpilogue epilogue :
           {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu, LinearEpilogue::kResidual}) {
        const Case c{&weight, shape.rows, epilogue};
        const Result actual = Run(*device_, c, input), expected = Run(*host_, c, input);
        const double scale = epilogue == LinearEpilogue::kSwiGlu ? 2 * bound / 0x1p-21 : 1;
        const numerics::Tolerance tolerance{.abs = bound * scale, .cosine = 1e-9};
        EXPECT_TRUE(AllClose(actual.first, expected.first, tolerance));
        EXPECT_TRUE(AllClose(actual.rest, expected.rest, tolerance));
      }
    }
  }
}

TEST_F(CudaRoundingLinearTest, RoundedInputsAndOutputsEqualTheirFloats) {
  constexpr int64_t kN = 200, kK = 136;
  constexpr int32_t kRows = 150;
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kN, kK, 1);
  const TestWeight input = MakeWeight({"", DType::kBfloat16}, kRows, kK, 2);
  const Result expected = Run(*host_, {&weight, kRows}, RoundFloats(kRows * kK, 2));
  const auto packed = device_->PackLinear({weight.tensor});
  for (const int32_t rows : {9, kRows}) {  // few rows go another way
    std::byte* workspace = Workspace(device_->LinearWorkspaceBytes(rows, kK));
    auto* first = Upload(std::vector<uint16_t>(rows * 4, 0xffff));
    auto* rest = Upload(std::vector<uint16_t>(rows * kN, 0xffff));
    const OutputSegment segments[] = {{first, 4, 3, DType::kBfloat16},
                                      {rest, kN, kN - 3, DType::kBfloat16}};
    ASSERT_TRUE(device_
                    ->Linear({}, {.weight = packed->get(),
                                  .num_rows = rows,
                                  .input = {.data = Upload(input.bytes),
                                            .dtype = DType::kBfloat16,
                                            .row_stride = kK},
                                  .outputs = segments,
                                  .workspace = workspace})
                    .ok());
    const std::vector<uint16_t> out = Download(rest, static_cast<size_t>(rows * kN));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < kN - 3; ++c) {
        const double value = DecodeBits(out[r * kN + c], 8, 7, false);
        EXPECT_NEAR(value, expected.rest[r * (kN + 1) + c], 1e-3 + 0x1p-8 * std::abs(value));
      }
      EXPECT_EQ(out[r * kN + kN - 1], 0xffff);
    }
  }
}

// Up to 128 rows and beyond.
// Where the device says that it rounds its input, rounding it before changes no bit.
TEST_F(CudaRoundingLinearTest, ItsInputMayBeRoundedBefore) {
  constexpr int64_t kN = 72, kK = 136;
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kN, kK, 1);
  const TestWeight other = MakeWeight({"", DType::kFloat32}, kN, kK, 1);
  const auto packed = device_->PackLinear({weight.tensor});
  EXPECT_FALSE(device_->LinearRoundsInput(**packed, 16));
  EXPECT_FALSE(device_->LinearRoundsInput(**device_->PackLinear({other.tensor}), 300));
  for (const int32_t rows : {17, 128, 300}) {
    SCOPED_TRACE(rows);
    ASSERT_TRUE(device_->LinearRoundsInput(**packed, rows));
    const std::vector<float> input = RandomFloats(rows * kK, 2);
    const auto run = [&](void* data, DType dtype) {
      float* out = Upload(std::vector<float>(rows * kN, kNan));
      const OutputSegment segment = {out, kN, kN};
      EXPECT_TRUE(
          device_
              ->Linear({}, {.weight = packed->get(),
                            .num_rows = rows,
                            .input = {.data = data, .dtype = dtype, .row_stride = kK},
                            .outputs = {&segment, 1},
                            .workspace = Workspace(device_->LinearWorkspaceBytes(rows, kK))})
              .ok());
      return Download(out, rows * kN);
    };
    EXPECT_TRUE(BitEqual(run(Upload(RoundWritten(input)), DType::kBfloat16),
                         run(Upload(input), DType::kFloat32)));
  }
}

TEST_F(CudaRoundingLinearTest, ARowHasTheSameBitsInEveryMediumAndInEveryLargeBatch) {
  constexpr int64_t kN = 200, kK = 544;
  const struct { int32_t rows, part_rows; } sizes[] = {{128, 20}, {300, 150}};
  for (const WeightKind& kind : kRoundingKinds) {
    const TestWeight weight = MakeWeight(kind, kN, kK, 3);
    for (const auto& size : sizes) {
      SCOPED_TRACE(testing::Message() << kind.name << ", " << size.rows);
      const std::vector<float> input = RandomFloats(size.rows * kK, 4);
      const Result together =
          Run(*device_, {&weight, size.rows, LinearEpilogue::kNone, true}, input);
      const Result again = Run(*device_, {&weight, size.rows, LinearEpilogue::kNone, true}, input);
      EXPECT_TRUE(BitEqual(again.rest, together.rest));
      for (const int32_t row : {0, 7, 100, size.rows - size.part_rows}) {
        const int32_t rows = size.part_rows;
        const std::vector<float> part(input.begin() + row * kK, input.begin() + (row + rows) * kK);
        const Result alone = Run(*device_, {&weight, rows, LinearEpilogue::kNone, true}, part);
        EXPECT_TRUE(
            BitEqual(alone.rest,
                     absl::MakeConstSpan(together.rest).subspan(row * (kN + 1), rows * (kN + 1))));
      }
    }
  }
}

TEST_F(CudaRoundingLinearTest, HeadsEqualTheCpu) {
  constexpr int64_t kHeads = 3, kHeadRows = 96, kCols = 160;
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kHeads * kHeadRows, kCols, 1);
  for (const int32_t rows : {1, 8, 9, 35}) {
    for (const bool transpose : {false, true}) {
      SCOPED_TRACE(testing::Message() << rows << (transpose ? " transposed" : ""));
      const HeadSlice slice{kHeads, kHeadRows, 32, 64, transpose};
      const int64_t n = transpose ? kCols : 64, k = transpose ? 64 : kCols;
      const std::vector<float> input = RoundFloats(rows * kHeads * (k + 4), 2);
      std::vector<float> out(rows * kHeads * (n + 2), kNan);
      const auto run = [&](Backend& backend, const float* in, float* to) {
        const auto packed = backend.PackHeadLinear(weight.tensor, slice);
        ASSERT_TRUE(packed.ok()) << packed.status();
        EXPECT_TRUE(backend
                        .HeadLinear({}, {.weight = packed->get(),
                                         .num_rows = rows,
                                         .input = in,
                                         .input_row_stride = kHeads * (k + 4),
                                         .input_head_stride = k + 4,
                                         .output = to,
                                         .output_row_stride = kHeads * (n + 2),
                                         .output_head_stride = n + 2})
                        .ok());
        EXPECT_TRUE(backend.Synchronize({}).ok());
      };
      float* device_out = Upload(out);
      run(*device_, Upload(input), device_out);
      run(*host_, input.data(), out.data());
      EXPECT_TRUE(AllClose(Download(device_out, out.size()), out, {.abs = 2e-4, .rel = 1e-5}));
    }
  }
}

class CudaHeadLinearTest : public DeviceTest, public ::testing::WithParamInterface<WeightKind> {};

TEST_P(CudaHeadLinearTest, EqualsTheCpu) {
  constexpr int64_t kHeads = 3, kHeadRows = 50, kCols = 40;
  constexpr int32_t kRows = 35;
  const TestWeight weight = MakeWeight(GetParam(), kHeads * kHeadRows, kCols, 1);
  for (const bool transpose : {false, true}) {
    const HeadSlice slice{kHeads, kHeadRows, 20, 27, transpose};
    const int64_t n = transpose ? kCols : 27, k = transpose ? 27 : kCols;
    std::vector<float> input = RandomFloats(kRows * kHeads * (k + 1), 2);
    std::vector<float> out(kRows * kHeads * (n + 2), kNan);
    const auto run = [&](Backend& backend, const float* in, float* to) {
      const auto packed = backend.PackHeadLinear(weight.tensor, slice);
      ASSERT_TRUE(packed.ok()) << packed.status();
      EXPECT_TRUE(backend
                      .HeadLinear({}, {.weight = packed->get(),
                                       .num_rows = kRows,
                                       .input = in,
                                       .input_row_stride = kHeads * (k + 1),
                                       .input_head_stride = k + 1,
                                       .output = to,
                                       .output_row_stride = kHeads * (n + 2),
                                       .output_head_stride = n + 2})
                      .ok());
      EXPECT_TRUE(backend.Synchronize({}).ok());
    };
    float* device_out = Upload(out);
    run(*device_, Upload(input), device_out);
    run(*host_, input.data(), out.data());
    EXPECT_TRUE(AllClose(Download(device_out, out.size()), out, {.abs = 5e-5, .rel = 1e-5}));
  }
}

// fp4 is a format of experts only.
std::vector<WeightKind> HeadWeightKinds() {
  std::vector<WeightKind> kinds = AllWeightKinds();
  std::erase_if(kinds, [](const WeightKind& k) { return k.dtype == DType::kFloat4E2m1; });
  return kinds;
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaHeadLinearTest, ::testing::ValuesIn(HeadWeightKinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kernels

#include "kernels/cpu/linear.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/convert.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<const MatrixKernels*> AllKernels() {
  std::vector<const MatrixKernels*> all = {&GenericMatrixKernels()};
  if (Avx2MatrixKernels() != nullptr) all.push_back(Avx2MatrixKernels());
  return all;
}

// Every table of kernels with every kind of weight.
class LinearTest : public ::testing::TestWithParam<std::tuple<const MatrixKernels*, WeightKind>> {
 protected:
  const MatrixKernels& kernels() const { return *std::get<0>(GetParam()); }
  const WeightKind& kind() const { return std::get<1>(GetParam()); }

  std::unique_ptr<PackedLinear> Pack(const TestWeight& weight) {
    auto packed = PackLinear(pool_, {weight.tensor}, kernels());
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }

  ThreadPool pool_{3};
};

std::vector<float> RunPlain(ThreadPool& pool, const PackedLinear& weight, const float* input,
                            int64_t row_stride, int32_t num_rows) {
  std::vector<float> out(static_cast<size_t>(num_rows * weight.out_features()), kNan);
  const OutputSegment segment = {out.data(), weight.out_features(), weight.out_features()};
  const absl::Status status =
      Linear(pool, {.weight = &weight,
                    .num_rows = num_rows,
                    .input = {.data = const_cast<float*>(input), .row_stride = row_stride},
                    .outputs = {&segment, 1}});
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// A float sum of n terms errs by about the square root of n roundings of the partial sums; four
// units of the absolute sum of the terms cover that with room.
double SumBound(double absolute_sum) { return 4 * 0x1p-24 * absolute_sum; }

struct Reference {
  std::vector<double> values;
  double bound = 0;
};

Reference Multiply(const TestWeight& weight, const std::vector<double>& rows, int64_t num_rows) {
  Reference reference;
  const int64_t k = weight.tensor.cols;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t n = 0; n < weight.tensor.rows; ++n) {
      double sum = 0, absolute = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double term = rows[static_cast<size_t>(r * k + i)] * weight.at(n, i);
        sum += term;
        absolute += std::abs(term);
      }
      reference.values.push_back(sum);
      reference.bound = std::max(reference.bound, SumBound(absolute));
    }
  }
  return reference;
}

TEST_P(LinearTest, EqualsTheDoubleProduct) {
  struct Shape {
    int64_t n, k;
    int32_t rows;
  };
  for (const Shape shape : {Shape{1, 1, 1},
                            {1, 300, 2},
                            {33, 1, 3},
                            {32, 2, 1},
                            {65, 7, 4},
                            {64, 128, 5},
                            {100, 129, 13},
                            {31, 515, 40},
                            {576, 96, 7}}) {
    const int64_t k = kind().Columns(shape.k);
    const TestWeight weight = MakeWeight(kind(), shape.n, k, 1);
    const std::vector<float> input = RandomFloats(shape.rows * k, 2);
    const Reference expected =
        Multiply(weight, std::vector<double>(input.begin(), input.end()), shape.rows);
    EXPECT_TRUE(numerics::AllClose(RunPlain(pool_, *Pack(weight), input.data(), k, shape.rows),
                                   expected.values, {.abs = expected.bound}))
        << shape.n << " x " << k << ", " << shape.rows << " rows";
  }
}

TEST_P(LinearTest, ARowHasTheSameBitsInEveryBatch) {
  constexpr int64_t kN = 70;
  constexpr int32_t kMaxRows = 40;
  const int64_t k = kind().Columns(333);
  const auto packed = Pack(MakeWeight(kind(), kN, k, 3));
  const std::vector<float> input = RandomFloats(kMaxRows * k, 4);
  std::vector<float> alone;
  for (int32_t r = 0; r < kMaxRows; ++r) {
    const std::vector<float> row = RunPlain(pool_, *packed, input.data() + r * k, k, 1);
    alone.insert(alone.end(), row.begin(), row.end());
  }
  for (int32_t rows = 1; rows <= kMaxRows; ++rows) {
    ASSERT_TRUE(
        numerics::BitEqual(RunPlain(pool_, *packed, input.data(), k, rows),
                           absl::MakeConstSpan(alone).subspan(0, static_cast<size_t>(rows * kN))))
        << rows << " rows";
  }
}

// Rows pass the block of 512 and its pieces; the threads differ; the bits do not.
TEST_P(LinearTest, ManyRowsHaveTheSameBitsOnAnyNumberOfThreads) {
  constexpr int64_t kN = 40;
  constexpr int32_t kRows = 1100;
  const int64_t k = kind().Columns(65);
  const auto packed = Pack(MakeWeight(kind(), kN, k, 5));
  const std::vector<float> input = RandomFloats(kRows * k, 6);
  ThreadPool one(1);
  const std::vector<float> all = RunPlain(pool_, *packed, input.data(), k, kRows);
  EXPECT_TRUE(numerics::BitEqual(all, RunPlain(one, *packed, input.data(), k, kRows)));
  for (const int32_t r : {0, 47, 48, 511, 512, 1023, 1099}) {
    EXPECT_TRUE(
        numerics::BitEqual(absl::MakeConstSpan(all).subspan(static_cast<size_t>(r * kN), kN),
                           RunPlain(one, *packed, input.data() + r * k, k, 1)))
        << "row " << r;
  }
}

// Between and after the rows lie NaN in the input (must not be read: it would spread) and a marker
// in the output (must not be written).
TEST_P(LinearTest, PaddingIsNeitherReadNorWritten) {
  constexpr int64_t kN = 45, kInStride = 41, kOutStride = 50;
  constexpr float kMarker = 1234.5f;
  const int64_t k = kind().Columns(37);
  const auto packed = Pack(MakeWeight(kind(), kN, k, 7));
  for (const int32_t rows : {1, 2, 5, 8}) {
    std::vector<float> input(static_cast<size_t>((rows + 2) * kInStride), kNan);
    const std::vector<float> values = RandomFloats(rows * k, 8);
    for (int32_t r = 0; r < rows; ++r) {
      std::copy_n(values.begin() + r * k, k, input.begin() + r * kInStride);
    }
    std::vector<float> out(static_cast<size_t>((rows + 2) * kOutStride), kMarker);
    const OutputSegment segment = {out.data(), kOutStride, kN};
    ASSERT_TRUE(Linear(pool_, {.weight = packed.get(),
                               .num_rows = rows,
                               .input = {.data = input.data(), .row_stride = kInStride},
                               .outputs = {&segment, 1}})
                    .ok());
    const std::vector<float> expected = RunPlain(pool_, *packed, values.data(), k, rows);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t r = i / kOutStride, c = i % kOutStride;
      const bool inside = r < static_cast<size_t>(rows) && c < kN;
      ASSERT_EQ(out[i], inside ? expected[r * kN + c] : kMarker) << "row " << r << " column " << c;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LinearTest,
                         ::testing::Combine(::testing::ValuesIn(AllKernels()),
                                            ::testing::ValuesIn(AllWeightKinds())),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)->name) + "_" +
                                  std::get<1>(info.param).name;
                         });

class LinearKernelsTest : public ::testing::TestWithParam<const MatrixKernels*> {
 protected:
  ThreadPool pool_{2};
};

// 256 outputs, one for each byte, at an even and at an odd step of the inner dimension.
TEST_P(LinearKernelsTest, EveryE4m3ByteIsExact) {
  for (const int odd : {0, 1}) {
    for (const bool with_nan : {false, true}) {
      std::vector<uint8_t> bytes(512, 0);
      std::vector<double> expected;
      for (int i = 0; i < 256; ++i) {
        const bool is_nan = (i & 0x7f) == 0x7f;
        const uint8_t byte = static_cast<uint8_t>(is_nan && !with_nan ? 0 : i);
        bytes[static_cast<size_t>(2 * i + odd)] = byte;
        expected.push_back(DecodeBits(byte, 4, 3, true));
      }
      const WeightTensor tensor = {
          .data = bytes.data(), .dtype = DType::kFloat8E4m3, .rows = 256, .cols = 2};
      const auto packed = PackLinear(pool_, {tensor}, *GetParam());
      ASSERT_TRUE(packed.ok());
      const std::vector<float> ones(14, 1.0f);
      for (const int32_t rows : {1, 7}) {
        const std::vector<float> out = RunPlain(pool_, **packed, ones.data(), 2, rows);
        for (int32_t r = 0; r < rows; ++r) {
          EXPECT_TRUE(numerics::AllClose(
              absl::MakeConstSpan(out).subspan(static_cast<size_t>(r) * 256, 256),
              absl::MakeConstSpan(expected), {}));
        }
      }
    }
  }
}

// 256 outputs, one for each pair of e2m1 values, and every e8m0 scale that a float holds.
TEST_P(LinearKernelsTest, EveryE2m1PairAndE8m0ScaleIsExact) {
  std::vector<uint8_t> bytes(256), scales(256);
  for (int i = 0; i < 256; ++i) bytes[i] = scales[i] = static_cast<uint8_t>(i);
  const TestWeight values = [&] {
    TestWeight weight;
    weight.bytes = bytes;
    return weight;
  }();
  for (const bool scaled : {false, true}) {
    for (const int step : {0, 1}) {
      std::vector<double> expected;
      for (int i = 0; i < 256; ++i) {
        const double value =
            DecodeElement(DType::kFloat4E2m1, values.bytes.data(), int64_t{2} * i + step);
        const double scale = i == 255 ? kNan : std::ldexp(1.0, i - 127);
        expected.push_back(scaled ? value * scale : value);
        // 6 * 2^127 is beyond float's largest number.
        if (std::abs(expected.back()) > std::numeric_limits<float>::max()) {
          expected.back() = std::copysign(std::numeric_limits<double>::infinity(), expected.back());
        }
      }
      WeightTensor tensor = {
          .data = bytes.data(), .dtype = DType::kFloat4E2m1, .rows = 256, .cols = 2};
      if (scaled) {
        tensor.scales = scales.data();
        tensor.scale_dtype = DType::kFloat8E8m0;
        tensor.scale_block_rows = 1;
        tensor.scale_block_cols = 32;
      }
      const auto packed = PackLinear(pool_, {tensor}, *GetParam());
      ASSERT_TRUE(packed.ok()) << packed.status();
      for (const int32_t rows : {1, 7}) {
        std::vector<float> input(2 * static_cast<size_t>(rows), 0.0f);
        for (int32_t r = 0; r < rows; ++r) input[static_cast<size_t>(2 * r + step)] = 1;
        const std::vector<float> out = RunPlain(pool_, **packed, input.data(), 2, rows);
        for (int32_t r = 0; r < rows; ++r) {
          EXPECT_TRUE(numerics::AllClose(
              absl::MakeConstSpan(out).subspan(static_cast<size_t>(r) * 256, 256),
              absl::MakeConstSpan(expected), {}))
              << "scaled " << scaled << " step " << step;
        }
      }
    }
  }
}

TEST_P(LinearKernelsTest, EveryHalfPrecisionPatternIsExact) {
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    std::vector<uint16_t> bits(65536);
    std::vector<double> expected;
    for (uint32_t i = 0; i < 65536; ++i) {
      bits[i] = static_cast<uint16_t>(i);
      expected.push_back(dtype == DType::kFloat16 ? DecodeBits(i, 5, 10, false)
                                                  : DecodeBits(i, 8, 7, false));
    }
    const auto packed = PackLinear(
        pool_, {WeightTensor{.data = bits.data(), .dtype = dtype, .rows = 65536, .cols = 1}},
        *GetParam());
    ASSERT_TRUE(packed.ok());
    const float one = 1;
    EXPECT_TRUE(numerics::AllClose(RunPlain(pool_, **packed, &one, 1, 1), expected, {}));
  }
}

TEST_P(LinearKernelsTest, SwiGluOfExtremeValues) {
  const std::vector<float> gate = {0,
                                   -0.0f,
                                   1,
                                   -1,
                                   20,
                                   -20,
                                   87,
                                   -87,
                                   100,
                                   -100,
                                   1e30f,
                                   -1e30f,
                                   std::numeric_limits<float>::infinity(),
                                   kNan,
                                   3.5f,
                                   -0.001f,
                                   12};
  const std::vector<float> up(gate.size(), 2.0f);
  std::vector<float> out(gate.size());
  for (const float limit : {0.0f, 10.0f, 1.5f}) {
    GetParam()->swiglu(gate.data(), up.data(), static_cast<int64_t>(gate.size()), limit,
                       out.data());
    std::vector<double> expected;
    for (const float g : gate) {
      const double clamped = limit > 0 && g > limit ? limit : g;
      expected.push_back(Silu(clamped) * (limit > 0 ? std::min(2.0, double{limit}) : 2.0));
    }
    // A few roundings; below exp's range the value is as good as 0.
    EXPECT_TRUE(numerics::AllClose(out, expected, {.abs = 1e-35, .rel = 6e-7}));
  }
  GetParam()->swiglu(up.data(), gate.data(), static_cast<int64_t>(gate.size()), 1.5f, out.data());
  EXPECT_TRUE(std::isnan(out[13]));
  EXPECT_FLOAT_EQ(out[11], static_cast<float>(Silu(1.5) * -1.5));
}

TEST_P(LinearKernelsTest, PrologueAddsNormsAndKeepsTheSum) {
  constexpr int64_t kN = 50, kK = 77, kStride = 80;
  constexpr int32_t kRows = 9;
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kN, kK, 1);
  const auto packed = PackLinear(pool_, {weight.tensor}, *GetParam());
  const std::vector<float> input = RandomFloats(kRows * kStride, 2);
  std::vector<float> residual = RandomFloats(kRows * kStride, 3);
  const std::vector<float> norm = RandomFloats(kK, 4);
  std::vector<double> rows, sums;
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<double> row;
    for (int64_t i = 0; i < kK; ++i) {
      const size_t at = static_cast<size_t>(r * kStride + i);
      row.push_back(input[at] + residual[at]);
    }
    sums.insert(sums.end(), row.begin(), row.end());
    const std::vector<double> normed = RmsNormReference(row, norm, 1e-3);
    rows.insert(rows.end(), normed.begin(), normed.end());
  }
  const Reference expected = Multiply(weight, rows, kRows);
  std::vector<float> out(kRows * kN);
  const OutputSegment segment = {out.data(), kN, kN};
  // residual_out may be residual_in.
  ASSERT_TRUE(
      Linear(pool_, {.weight = packed->get(),
                     .num_rows = kRows,
                     .input = {.data = const_cast<float*>(input.data()), .row_stride = kStride},
                     .residual_in = residual.data(),
                     .residual_out = residual.data(),
                     .norm_weight = norm.data(),
                     .norm_eps = 1e-3f,
                     .outputs = {&segment, 1}})
          .ok());
  // Three more roundings than the plain product, in each normed value.
  EXPECT_TRUE(numerics::AllClose(out, expected.values, {.abs = 2 * expected.bound}));
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_TRUE(numerics::AllClose(
        absl::MakeConstSpan(residual).subspan(static_cast<size_t>(r * kStride), kK),
        absl::MakeConstSpan(sums).subspan(static_cast<size_t>(r * kK), kK), {.rel = 1e-7}));
  }
}

TEST_P(LinearKernelsTest, ReadsHalfPrecisionActivations) {
  constexpr int64_t kN = 20, kK = 33;
  const TestWeight weight = MakeWeight({"", DType::kFloat32}, kN, kK, 1);
  const auto packed = PackLinear(pool_, {weight.tensor}, *GetParam());
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const TestWeight activations = MakeWeight({"", dtype}, 4, kK, 2);
    const Reference expected = Multiply(weight, activations.values, 4);
    std::vector<float> out(4 * kN);
    const OutputSegment segment = {out.data(), kN, kN};
    ASSERT_TRUE(Linear(pool_, {.weight = packed->get(),
                               .num_rows = 4,
                               .input = {.data = const_cast<void*>(activations.tensor.data),
                                         .dtype = dtype,
                                         .row_stride = kK},
                               .outputs = {&segment, 1}})
                    .ok());
    EXPECT_TRUE(numerics::AllClose(out, expected.values, {.abs = expected.bound}));
  }
}

// q ‖ kv_a: tensors of different dtypes and odd sizes, scattered over segments that cut elsewhere.
TEST_P(LinearKernelsTest, StacksTensorsAndScattersSegments) {
  constexpr int64_t kK = 130;
  constexpr int32_t kRows = 5;
  const TestWeight parts[] = {MakeWeight({"", DType::kFloat8E4m3, 128, 128}, 37, kK, 1),
                              MakeWeight({"", DType::kBfloat16}, 70, kK, 2),
                              MakeWeight({"", DType::kFloat32}, 3, kK, 3)};
  const auto packed =
      PackLinear(pool_, {parts[0].tensor, parts[1].tensor, parts[2].tensor}, *GetParam());
  ASSERT_TRUE(packed.ok()) << packed.status();
  EXPECT_EQ((*packed)->out_features(), 110);
  const std::vector<float> input = RandomFloats(kRows * kK, 4);
  const std::vector<double> rows(input.begin(), input.end());
  std::vector<float> a(kRows * 50, kNan), b(kRows * 64, kNan), c(kRows * 1, kNan);
  const OutputSegment segments[] = {{a.data(), 50, 50}, {b.data(), 64, 59}, {c.data(), 1, 1}};
  ASSERT_TRUE(Linear(pool_, {.weight = packed->get(),
                             .num_rows = kRows,
                             .input = {.data = const_cast<float*>(input.data()), .row_stride = kK},
                             .outputs = segments})
                  .ok());
  std::vector<float> joined;
  std::vector<double> expected;
  double bound = 0;
  for (int32_t r = 0; r < kRows; ++r) {
    joined.insert(joined.end(), a.begin() + r * 50, a.begin() + (r + 1) * 50);
    joined.insert(joined.end(), b.begin() + r * 64, b.begin() + r * 64 + 59);
    joined.push_back(c[static_cast<size_t>(r)]);
    for (const TestWeight& part : parts) {
      const Reference row = Multiply(part, {rows.begin() + r * kK, rows.begin() + (r + 1) * kK}, 1);
      expected.insert(expected.end(), row.values.begin(), row.values.end());
      bound = std::max(bound, row.bound);
    }
  }
  EXPECT_TRUE(numerics::AllClose(joined, expected, {.abs = bound}));
}

TEST_P(LinearKernelsTest, ResidualEpilogueMayWriteOverTheResidual) {
  constexpr int64_t kN = 66, kK = 40;
  constexpr int32_t kRows = 7;
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kN, kK, 1);
  const auto packed = PackLinear(pool_, {weight.tensor}, *GetParam());
  const std::vector<float> input = RandomFloats(kRows * kK, 2);
  std::vector<float> hidden = RandomFloats(kRows * kN, 3);
  Reference expected = Multiply(weight, {input.begin(), input.end()}, kRows);
  for (size_t i = 0; i < hidden.size(); ++i) expected.values[i] += hidden[i];
  const OutputSegment segment = {hidden.data(), kN, kN};
  ASSERT_TRUE(Linear(pool_, {.weight = packed->get(),
                             .num_rows = kRows,
                             .input = {.data = const_cast<float*>(input.data()), .row_stride = kK},
                             .epilogue = LinearEpilogue::kResidual,
                             .epilogue_residual = hidden.data(),
                             .outputs = {&segment, 1}})
                  .ok());
  EXPECT_TRUE(numerics::AllClose(hidden, expected.values, {.abs = 2 * expected.bound}));
}

// Gate and up as two tensors, and as one fused tensor; 45 columns end inside a panel.
TEST_P(LinearKernelsTest, SwiGluEpilogueOfStackedAndFusedTensors) {
  constexpr int64_t kN = 45, kK = 64;
  const TestWeight fused = MakeWeight({"", DType::kBfloat16}, 2 * kN, kK, 1);
  WeightTensor gate = fused.tensor, up = fused.tensor;
  gate.rows = up.rows = kN;
  up.data = fused.bytes.data() + kN * kK * 2;
  for (const int32_t rows : {1, 2, 11}) {
    const std::vector<float> input = RandomFloats(rows * kK, 2);
    const Reference both = Multiply(fused, {input.begin(), input.end()}, rows);
    for (const float limit : {0.0f, 3.0f}) {
      std::vector<double> expected;
      for (int32_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < kN; ++c) {
          double g = both.values[static_cast<size_t>(r * 2 * kN + c)];
          double u = both.values[static_cast<size_t>(r * 2 * kN + kN + c)];
          if (limit > 0) g = std::min<double>(g, limit), u = std::clamp<double>(u, -limit, limit);
          expected.push_back(Silu(g) * u);
        }
      }
      for (const auto& tensors :
           {std::vector<WeightTensor>{fused.tensor}, std::vector<WeightTensor>{gate, up}}) {
        const auto packed = PackLinear(pool_, tensors, *GetParam());
        std::vector<float> out(static_cast<size_t>(rows * kN));
        const OutputSegment segment = {out.data(), kN, kN};
        const absl::Status status =
            Linear(pool_, {.weight = packed->get(),
                           .num_rows = rows,
                           .input = {.data = const_cast<float*>(input.data()), .row_stride = kK},
                           .epilogue = LinearEpilogue::kSwiGlu,
                           .swiglu_limit = limit,
                           .outputs = {&segment, 1}});
        ASSERT_TRUE(status.ok()) << status;
        // |silu'| < 1.1: an error of the products grows by the other factor, which is below 40.
        EXPECT_TRUE(numerics::AllClose(out, expected, {.abs = 50 * both.bound, .rel = 1e-6}));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LinearKernelsTest, ::testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

class LinearErrorTest : public ::testing::Test {
 protected:
  LinearErrorTest() {
    packed_ = PackLinear(pool_, {weight_.tensor}).value();
    params_ = {.weight = packed_.get(),
               .num_rows = 2,
               .input = {.data = input_.data(), .row_stride = 8},
               .outputs = {&segment_, 1}};
  }

  std::string Message(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  ThreadPool pool_{1};
  TestWeight weight_ = MakeWeight({"", DType::kBfloat16}, 6, 8, 1);
  std::unique_ptr<PackedLinear> packed_;
  std::vector<float> input_ = std::vector<float>(16);
  std::vector<float> out_ = std::vector<float>(12);
  OutputSegment segment_ = {out_.data(), 6, 6};
  LinearParams params_;
};

TEST_F(LinearErrorTest, PackingNamesWhatItCannotTake) {
  EXPECT_THAT(Message(PackLinear(pool_, {}).status()), HasSubstr("no weight tensor"));
  WeightTensor tensor = weight_.tensor;
  tensor.dtype = DType::kInt32;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()), HasSubstr("dtype int32"));
  tensor.dtype = DType::kFloat4E2m1;
  tensor.cols = 7;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()),
              HasSubstr("float4_e2m1 weight tensor of 7 columns"));
  tensor.cols = 8;
  tensor.scales = input_.data();
  tensor.scale_block_cols = 5;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()), HasSubstr("scales over 5 of them"));
  tensor = weight_.tensor;
  tensor.cols = 7;
  EXPECT_THAT(Message(PackLinear(pool_, {weight_.tensor, tensor}).status()),
              HasSubstr("8 and 7 columns"));
  tensor = weight_.tensor;
  tensor.rows = 0;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()), HasSubstr("[0, 8] is empty"));
  tensor = weight_.tensor;
  tensor.scales = input_.data();
  tensor.scale_dtype = DType::kBfloat16;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()), HasSubstr("scales of dtype bfloat16"));
  tensor.scale_dtype = DType::kFloat32;
  tensor.scale_block_cols = 0;
  EXPECT_THAT(Message(PackLinear(pool_, {tensor}).status()), HasSubstr("128 x 0"));
}

TEST_F(LinearErrorTest, LaunchNamesWhatDoesNotFit) {
  EXPECT_TRUE(Linear(pool_, params_).ok());
  LinearParams params = params_;
  params.input.dtype = DType::kFloat8E4m3;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("activations of dtype float8"));
  params = params_;
  params.input.row_stride = 7;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("row stride 7 < in_features 8"));
  params = params_;
  const OutputSegment wrong = {out_.data(), 5, 5};
  params.outputs = {&wrong, 1};
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("hold 5 columns, the product has 6"));
  params = params_;
  params.epilogue = LinearEpilogue::kSwiGlu;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("hold 6 columns, the product has 3"));
  params = params_;
  params.epilogue = LinearEpilogue::kResidual;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("needs a residual"));
  params = params_;
  OutputSegment rounded = {out_.data(), 6, 6, DType::kBfloat16};
  params.outputs = {&rounded, 1};
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("outputs of dtype bfloat16"));
  params.epilogue = LinearEpilogue::kResidual;
  params.epilogue_residual = out_.data();
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("dtype bfloat16 with a residual"));
  rounded.dtype = DType::kInt32;
  params.epilogue = LinearEpilogue::kNone;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("output segment of dtype int32"));
  params = params_;
  params.num_rows = -1;
  EXPECT_THAT(Message(Linear(pool_, params)), HasSubstr("-1 rows"));
}

TEST_F(LinearErrorTest, NoRowsIsFine) {
  params_.num_rows = 0;
  EXPECT_TRUE(Linear(pool_, params_).ok());
}

}  // namespace
}  // namespace kernels::cpu

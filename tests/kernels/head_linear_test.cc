#include "kernels/cpu/head_linear.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr float kMarker = 1234.5f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  WeightKind kind;
  HeadSlice slice;
  int64_t cols = 0;
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const WeightKind& kind : AllWeightKinds()) {
    // kv_b of a small model: per head 20 key rows, then 12 value rows; heads do not line up with
    // any scale block.
    const HeadSlice w_uk = {3, 32, 0, 20, true}, w_uv = {3, 32, 20, 12, false};
    const HeadSlice odd = {5, 45, 3, 41, true}, odd_rows = {5, 45, 4, 37, false};
    cases.push_back({kind, w_uv, 64});
    cases.push_back({kind, odd_rows, kind.Columns(67)});
    cases.push_back({kind, {1, 1, 0, 1, false}, kind.Columns(1)});
    if (kind.dtype == DType::kFloat4E2m1) continue;  // is not transposed
    cases.push_back({kind, w_uk, 64});
    cases.push_back({kind, odd, 67});
  }
  return cases;
}

class HeadLinearTest : public ::testing::TestWithParam<const MatrixKernels*> {
 protected:
  ThreadPool pool_{2};
};

std::vector<const MatrixKernels*> AllKernels() {
  std::vector<const MatrixKernels*> all = {&GenericMatrixKernels()};
  if (Avx2MatrixKernels() != nullptr) all.push_back(Avx2MatrixKernels());
  return all;
}

// [num_rows, num_heads, width] inside larger strides, everything else NaN or a marker.
struct Strided {
  Strided(int64_t num_rows, int64_t num_heads, int64_t width, float fill)
      : width(width),
        head_stride(width + 3),
        row_stride(num_heads * head_stride + 5),
        values(static_cast<size_t>((num_rows + 1) * row_stride), fill) {}
  float& at(int64_t row, int64_t head, int64_t i) {
    return values[static_cast<size_t>(row * row_stride + head * head_stride + i)];
  }
  int64_t width, head_stride, row_stride;
  std::vector<float> values;
};

TEST_P(HeadLinearTest, EqualsTheDoubleProductAndLeavesPaddingAlone) {
  uint32_t seed = 0;
  for (const Case& c : AllCases()) {
    const HeadSlice& slice = c.slice;
    const TestWeight weight = MakeWeight(c.kind, slice.num_heads * slice.head_rows, c.cols, ++seed);
    const auto packed = PackHeadLinear(pool_, weight.tensor, slice, *GetParam());
    ASSERT_TRUE(packed.ok()) << packed.status();
    const int64_t n = slice.transpose ? c.cols : slice.row_count;
    const int64_t k = slice.transpose ? slice.row_count : c.cols;
    EXPECT_EQ((*packed)->out_features(), n);
    EXPECT_EQ((*packed)->in_features(), k);
    EXPECT_EQ((*packed)->num_heads(), slice.num_heads);
    for (const int32_t rows : {1, 3, 8}) {
      Strided input(rows, slice.num_heads, k, kNan), output(rows, slice.num_heads, n, kMarker);
      const std::vector<float> values = RandomFloats(rows * slice.num_heads * k, ++seed);
      std::vector<double> expected;
      double bound = 0;
      for (int64_t r = 0, i = 0; r < rows; ++r) {
        for (int64_t h = 0; h < slice.num_heads; ++h) {
          for (int64_t x = 0; x < k; ++x, ++i) input.at(r, h, x) = values[static_cast<size_t>(i)];
          for (int64_t y = 0; y < n; ++y) {
            double sum = 0, absolute = 0;
            for (int64_t x = 0; x < k; ++x) {
              const int64_t row = h * slice.head_rows + slice.row_begin + (slice.transpose ? x : y);
              const double term = input.at(r, h, x) * weight.at(row, slice.transpose ? y : x);
              sum += term;
              absolute += std::abs(term);
            }
            expected.push_back(sum);
            bound = std::max(bound, 4 * 0x1p-24 * absolute);  // as in linear_test
          }
        }
      }
      ASSERT_TRUE(HeadLinear(pool_, {.weight = packed->get(),
                                     .num_rows = rows,
                                     .input = input.values.data(),
                                     .input_row_stride = input.row_stride,
                                     .input_head_stride = input.head_stride,
                                     .output = output.values.data(),
                                     .output_row_stride = output.row_stride,
                                     .output_head_stride = output.head_stride})
                      .ok());
      std::vector<float> actual;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t h = 0; h < slice.num_heads; ++h) {
          for (int64_t y = 0; y < n; ++y) {
            actual.push_back(output.at(r, h, y));
            output.at(r, h, y) = kMarker;
          }
        }
      }
      EXPECT_TRUE(numerics::AllClose(actual, expected, {.abs = bound}))
          << c.kind.name << " cols " << c.cols << " rows " << rows;
      EXPECT_THAT(output.values, ::testing::Each(kMarker));
    }
  }
}

TEST_P(HeadLinearTest, ARowHasTheSameBitsInEveryBatch) {
  constexpr int32_t kMaxRows = 40, kHeads = 2;
  constexpr int64_t kK = 70, kN = 35;
  for (const WeightKind& kind : AllWeightKinds()) {
    const TestWeight weight = MakeWeight(kind, kHeads * kN, kK, 1);
    const auto packed =
        PackHeadLinear(pool_, weight.tensor, {kHeads, kN, 0, kN, false}, *GetParam());
    ASSERT_TRUE(packed.ok());
    const std::vector<float> input = RandomFloats(kMaxRows * kHeads * kK, 2);
    const auto run = [&](int32_t first, int32_t rows) {
      std::vector<float> out(static_cast<size_t>(rows) * kHeads * kN);
      EXPECT_TRUE(HeadLinear(pool_, {.weight = packed->get(),
                                     .num_rows = rows,
                                     .input = input.data() + first * kHeads * kK,
                                     .input_row_stride = kHeads * kK,
                                     .input_head_stride = kK,
                                     .output = out.data(),
                                     .output_row_stride = kHeads * kN,
                                     .output_head_stride = kN})
                      .ok());
      return out;
    };
    std::vector<float> alone;
    for (int32_t r = 0; r < kMaxRows; ++r) {
      const std::vector<float> row = run(r, 1);
      alone.insert(alone.end(), row.begin(), row.end());
    }
    for (int32_t rows = 1; rows <= kMaxRows; ++rows) {
      ASSERT_TRUE(numerics::BitEqual(run(0, rows), absl::MakeConstSpan(alone).subspan(
                                                       0, static_cast<size_t>(rows) * kHeads * kN)))
          << kind.name << " " << rows << " rows";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HeadLinearTest, ::testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(HeadLinearErrorTest, NamesWhatDoesNotFit) {
  ThreadPool pool(1);
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, 12, 8, 1);
  for (const HeadSlice& slice :
       {HeadSlice{4, 4, 0, 4, false}, HeadSlice{3, 4, 1, 4, false}, HeadSlice{3, 4, -1, 2, false},
        HeadSlice{0, 4, 0, 4, false}, HeadSlice{3, 4, 0, 0, true}}) {
    const auto packed = PackHeadLinear(pool, weight.tensor, slice);
    EXPECT_EQ(packed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(packed.status().message()),
                HasSubstr("does not fit a tensor of 12 rows"));
  }
  const TestWeight pairs = MakeWeight({"", DType::kFloat4E2m1}, 12, 8, 1);
  EXPECT_THAT(
      std::string(PackHeadLinear(pool, pairs.tensor, {3, 4, 0, 4, true}).status().message()),
      HasSubstr("transposed weights of dtype float4_e2m1"));
  const auto packed = PackHeadLinear(pool, weight.tensor, {3, 4, 0, 4, false});
  ASSERT_TRUE(packed.ok());
  std::vector<float> data(100);
  const absl::Status status = HeadLinear(pool, {.weight = packed->get(),
                                                .num_rows = 1,
                                                .input = data.data(),
                                                .input_row_stride = 24,
                                                .input_head_stride = 7,
                                                .output = data.data() + 50,
                                                .output_row_stride = 12,
                                                .output_head_stride = 4});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("head strides 7 (input)"));
}

}  // namespace
}  // namespace kernels::cpu

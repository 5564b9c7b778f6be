#include "kernels/cpu/rope.h"

#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

struct Table {
  Table(int32_t rope_dim, int32_t max_positions, RopeLayout layout) {
    for (int32_t position = 0; position < max_positions; ++position) {
      for (int32_t i = 0; i < rope_dim / 2; ++i) {
        const double angle = position * std::pow(100.0, -2.0 * i / rope_dim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    table = {cos.data(), sin.data(), rope_dim, max_positions, layout};
  }
  std::vector<float> cos, sin;
  RopeTable table;
};

class RopeTest : public ::testing::TestWithParam<RopeLayout> {
 protected:
  ThreadPool pool_{2};
};

TEST_P(RopeTest, RotatesPairsAndNothingElse) {
  for (const int32_t rope_dim : {2, 6, 64}) {
    const Table table(rope_dim, 50, GetParam());
    const int32_t rows = 37, heads = 3;
    const int64_t head_stride = rope_dim + 5, row_stride = heads * head_stride + 2;
    const std::vector<float> before = RandomTensor(rows * row_stride + 1, 1);
    std::vector<float> x = before;
    std::vector<int32_t> positions(rows);
    for (int32_t t = 0; t < rows; ++t) positions[t] = t * 13 % 50;
    positions[0] = 49;  // the table's last row

    RopeParams params;
    params.num_rows = rows;
    params.num_heads = heads;
    params.data = x.data() + 1;
    params.row_stride = row_stride;
    params.head_stride = head_stride;
    params.rope = table.table;
    params.positions = positions.data();
    ASSERT_TRUE(Rope(pool_, params).ok());

    std::vector<double> expected(before.begin(), before.end());
    for (int32_t t = 0; t < rows; ++t) {
      for (int32_t h = 0; h < heads; ++h) {
        for (int32_t i = 0; i < rope_dim / 2; ++i) {
          const bool pairs = GetParam() == RopeLayout::kInterleaved;
          const int64_t base = 1 + t * row_stride + h * head_stride;
          const int64_t a = base + (pairs ? 2 * i : i);
          const int64_t b = base + (pairs ? 2 * i + 1 : i + rope_dim / 2);
          const double angle = positions[t] * std::pow(100.0, -2.0 * i / rope_dim);
          expected[a] = before[a] * std::cos(angle) - before[b] * std::sin(angle);
          expected[b] = before[b] * std::cos(angle) + before[a] * std::sin(angle);
        }
      }
    }
    EXPECT_TRUE(numerics::AllClose(x, expected, {.abs = 1e-6, .rel = 1e-5}));
  }
}

// V4's queries: 10 values of a head, the last 6 rotary, divided by their root mean square first.
TEST_P(RopeTest, NormsTheValuesThatEndWithTheRotaryOnes) {
  const Table table(6, 50, GetParam());
  const int32_t rows = 3, heads = 2;
  const int64_t head_stride = 12, row_stride = 27;
  const std::vector<float> before = RandomTensor(rows * row_stride, 1);
  std::vector<float> x = before, expected = before;
  const std::vector<int32_t> positions = {0, 7, 49};
  for (int32_t t = 0; t < rows; ++t) {
    for (int32_t h = 0; h < heads; ++h) {
      float* head = expected.data() + t * row_stride + h * head_stride;
      double squares = 0;
      for (int32_t i = 0; i < 10; ++i) squares += double{head[i]} * head[i];
      for (int32_t i = 0; i < 10; ++i) {
        head[i] = static_cast<float>(head[i] / std::sqrt(squares / 10 + 1e-2));
      }
      Rotate(table.table, positions[t], head + 4);
    }
  }
  RopeParams params;
  params.num_rows = rows;
  params.num_heads = heads;
  params.data = x.data() + 4;
  params.row_stride = row_stride;
  params.head_stride = head_stride;
  params.rope = table.table;
  params.positions = positions.data();
  params.norm_dim = 10;
  params.norm_eps = 1e-2f;
  ASSERT_TRUE(Rope(pool_, params).ok());
  EXPECT_TRUE(numerics::AllClose<float>(x, expected, {.abs = 1e-6, .rel = 1e-6}));
  for (const size_t untouched : {10u, 11u, 22u, 26u}) EXPECT_EQ(x[untouched], before[untouched]);
  params.norm_dim = 5;
  EXPECT_THAT(Rope(pool_, params).ToString(), HasSubstr("a norm over 5 values"));
}

TEST_P(RopeTest, RotatingBackUndoesIt) {
  const Table table(6, 50, GetParam());
  const std::vector<float> before = RandomTensor(6, 2);
  for (const int32_t position : {0, 1, 49}) {
    std::vector<float> x = before;
    Rotate(table.table, position, x.data());
    RotateBack(table.table, position, x.data());
    EXPECT_TRUE(numerics::AllClose<float>(x, before, {.abs = 1e-6}));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, RopeTest,
                         ::testing::Values(RopeLayout::kInterleaved, RopeLayout::kHalfSplit));

TEST(RopeErrorTest, APositionOutsideTheTableIsRefusedBeforeAnythingIsWritten) {
  ThreadPool pool(1);
  const Table table(4, 10, RopeLayout::kInterleaved);
  for (const int32_t bad : {-1, 10, 1 << 30}) {
    std::vector<float> x(8, 1.0f);
    const std::vector<int32_t> positions = {3, bad};
    RopeParams params;
    params.num_rows = 2;
    params.num_heads = 1;
    params.data = x.data();
    params.row_stride = 4;
    params.head_stride = 4;
    params.rope = table.table;
    params.positions = positions.data();
    const absl::Status status = Rope(pool, params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr("row 1: position"));
    EXPECT_THAT(x, ::testing::Each(1.0f));
  }
}

TEST(RopeErrorTest, AnOddRotaryDimensionIsRefused) {
  ThreadPool pool(1);
  Table table(4, 10, RopeLayout::kInterleaved);
  table.table.rope_dim = 3;
  RopeParams params;
  params.rope = table.table;
  EXPECT_EQ(Rope(pool, params).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kernels::cpu

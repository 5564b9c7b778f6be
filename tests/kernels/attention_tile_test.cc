#include "kernels/cpu/attention_tile.h"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/attention_tile_primitives.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every implementation that runs here.
std::vector<const TilePrimitives*> Implementations() {
  std::vector<const TilePrimitives*> all = {&PortableTilePrimitives()};
  if (Avx2TilePrimitives() != nullptr) all.push_back(Avx2TilePrimitives());
  return all;
}

class TilePrimitivesTest : public ::testing::TestWithParam<const TilePrimitives*> {};

TEST_P(TilePrimitivesTest, ScoresEqualTheReferenceAtEverySize) {
  const struct {
    int32_t dim0, dim1, rows, first_row, keys;
  } cases[] = {{128, 64, 64, 0, 64}, {24, 6, 13, 2, 17}, {7, 0, 5, 0, 1},    {0, 9, 3, 1, 5},
               {16, 8, 30, 0, 62},   {1, 1, 1, 0, 3},    {33, 3, 29, 28, 64}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.dim0);
    const std::vector<float> q = RandomTensor(c.rows * (c.dim0 + c.dim1), 1);
    const std::vector<float> k = RandomTensor(c.keys * (c.dim0 + c.dim1), 2);
    auto rows = std::make_unique<TileRows>();
    TileKeys keys;
    rows->count = c.rows;
    for (int32_t i = 0; i < c.rows; ++i) {
      rows->q0[i] = q.data() + i * (c.dim0 + c.dim1);
      rows->q1[i] = rows->q0[i] + c.dim0;
    }
    for (int32_t j = 0; j < c.keys; ++j) {
      keys.k0[j] = k.data() + j * (c.dim0 + c.dim1);
      keys.k1[j] = keys.k0[j] + c.dim0;
    }
    std::vector<float> scores(kMaxTileRows * kMaxTileKeys, kNan);
    GetParam()->scores({c.dim0, c.dim1, 0, 1}, *rows, c.first_row, keys, c.keys, scores.data());
    for (int32_t i = c.first_row; i < c.rows; ++i) {
      std::vector<double> expected(c.keys, 0.0);
      for (int32_t j = 0; j < c.keys; ++j) {
        for (int32_t d = 0; d < c.dim0 + c.dim1; ++d) {
          expected[j] += static_cast<double>(rows->q0[i][d]) * keys.k0[j][d];
        }
      }
      // Sums of up to 192 products of unit normal numbers.
      EXPECT_TRUE(AllClose(absl::MakeConstSpan(scores).subspan(i * kMaxTileKeys, c.keys),
                           absl::MakeConstSpan(expected), {.abs = 1e-5, .rel = 1e-5}));
    }
  }
}

TEST_P(TilePrimitivesTest, SoftmaxIgnoresWhatIsNotVisible) {
  for (int32_t visible = 1; visible <= kMaxTileKeys; ++visible) {
    const std::vector<float> raw = RandomTensor(kMaxTileKeys, visible, 20);
    for (const float old_max : {-kInfinity, -3.0f, 100.0f}) {
      std::vector<float> scores = raw;
      for (int32_t j = visible; j < kMaxTileKeys; ++j) scores[j] = j % 2 == 0 ? kNan : kInfinity;
      float max = old_max, sum = old_max == -kInfinity ? 0.0f : 2.5f;
      const double old_sum = sum;
      const float correction = GetParam()->softmax(scores.data(), visible, 0.25f, &max, &sum);
      double expected_max = old_max;
      for (int32_t j = 0; j < visible; ++j) expected_max = std::max(expected_max, 0.25 * raw[j]);
      std::vector<double> expected(visible);
      double expected_sum = old_sum * std::exp(old_max - expected_max);
      for (int32_t j = 0; j < visible; ++j) {
        expected[j] = std::exp(0.25 * raw[j] - expected_max);
        expected_sum += expected[j];
      }
      EXPECT_EQ(max, static_cast<float>(expected_max));
      EXPECT_NEAR(sum, expected_sum, 1e-5 * expected_sum);
      EXPECT_NEAR(correction, std::exp(old_max - expected_max), 1e-6);
      // exp's relative error is that of its argument's rounding (up to 2^-24 * 64) and its own ulp.
      EXPECT_TRUE(AllClose(absl::MakeConstSpan(scores).subspan(0, visible),
                           absl::MakeConstSpan(expected), {.abs = 1e-37, .rel = 1e-5}));
    }
  }
}

TEST_P(TilePrimitivesTest, FarScoresWeighNothingAndNanStays) {
  std::vector<float> scores(kMaxTileKeys, 0.0f);
  scores[1] = -80;
  scores[2] = -120;
  scores[3] = -kInfinity;
  float max = -kInfinity, sum = 0;
  GetParam()->softmax(scores.data(), 4, 1, &max, &sum);
  EXPECT_EQ(scores[0], 1.0f);
  EXPECT_NEAR(scores[1], std::exp(-80.0), 1e-40);
  EXPECT_LT(scores[2], 1e-37f);
  EXPECT_EQ(scores[3], 0.0f);
  scores.assign(kMaxTileKeys, 1.0f);
  scores[2] = kNan;
  GetParam()->softmax(scores.data(), 4, 1, &max, &sum);
  EXPECT_TRUE(std::isnan(sum));
}

TEST_P(TilePrimitivesTest, ValuesAreAddedToTheRowsGiven) {
  for (const int32_t dim : {1, 5, 8, 16, 20, 31, 128}) {
    SCOPED_TRACE(dim);
    const std::vector<float> v = RandomTensor(kMaxTileKeys * dim, 3);
    const std::vector<float> weights = RandomTensor(4 * kMaxTileKeys, 4);
    const float correction[4] = {1, 0.5f, 0, 2};
    const float* v_rows[kMaxTileKeys];
    for (int32_t j = 0; j < kMaxTileKeys; ++j) v_rows[j] = v.data() + j * dim;
    for (int32_t num_rows = 1; num_rows <= 4; ++num_rows) {
      std::vector<float> acc = RandomTensor(5 * dim, 5);
      std::vector<double> expected(acc.begin(), acc.end());
      float* acc_rows[4];
      for (int32_t i = 0; i < num_rows; ++i) acc_rows[i] = acc.data() + i * dim;
      GetParam()->add_values(num_rows, weights.data(), v_rows, 3, 50, correction, dim, acc_rows);
      for (int32_t i = 0; i < num_rows; ++i) {
        for (int32_t d = 0; d < dim; ++d) {
          expected[i * dim + d] *= correction[i];
          for (int32_t j = 3; j < 50; ++j) {
            expected[i * dim + d] +=
                static_cast<double>(weights[i * kMaxTileKeys + j]) * v[j * dim + d];
          }
        }
      }
      EXPECT_TRUE(AllClose(acc, expected, {.abs = 1e-5, .rel = 1e-5}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Implementations, TilePrimitivesTest,
                         ::testing::ValuesIn(Implementations()));

TEST(MergeByLseTest, TwoHalvesMakeTheWhole) {
  // Two keys with scores 1 and 3 and values 10 and 20.
  std::vector<float> out = {10};
  float lse = 1;
  const std::vector<float> part = {20};
  MergeByLse(part.data(), 3, 1, out.data(), &lse);
  const double weight = 1 / (1 + std::exp(2.0));
  EXPECT_NEAR(out[0], 10 * weight + 20 * (1 - weight), 1e-5);
  EXPECT_NEAR(lse, std::log(std::exp(1.0) + std::exp(3.0)), 1e-6);
}

TEST(MergeByLseTest, ASideWithoutKeysIsNotRead) {
  const std::vector<float> value = {1.25f, -3}, poison = {kNan, kNan};
  std::vector<float> out = poison;
  float lse = -kInfinity;
  MergeByLse(value.data(), 0.7f, 2, out.data(), &lse);
  EXPECT_TRUE(BitEqual(out, value));
  EXPECT_EQ(lse, 0.7f);
  MergeByLse(poison.data(), -kInfinity, 2, out.data(), &lse);
  EXPECT_TRUE(BitEqual(out, value));
  EXPECT_EQ(lse, 0.7f);
}

}  // namespace
}  // namespace kernels::cpu

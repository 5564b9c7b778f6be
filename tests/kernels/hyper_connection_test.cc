#include "kernels/cpu/hyper_connection.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/linear.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

using Row = std::vector<double>;

// What models.md 7.2 says, for one row, in double.
struct Mixed {
  Row pre, post, comb, collapsed;
};

Mixed MixReference(const TestWeight& fn, const std::vector<float>& base,
                   const std::vector<float>& scale, const Row& f, size_t n, int iterations,
                   double norm_eps, double eps) {
  double squares = 0;
  for (const double value : f) squares += value * value;
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(f.size()) + norm_eps);
  Row m;
  for (int64_t i = 0; i < fn.tensor.rows; ++i) {
    double sum = 0;
    for (size_t k = 0; k < f.size(); ++k) sum += fn.at(i, static_cast<int64_t>(k)) * f[k];
    m.push_back(sum * inverse);
  }
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  Mixed mixed;
  for (size_t j = 0; j < n; ++j) mixed.pre.push_back(sigmoid(m[j] * scale[0] + base[j]) + eps);
  const size_t hidden = f.size() / n;
  mixed.collapsed.assign(hidden, 0);
  for (size_t j = 0; j < n; ++j) {
    for (size_t i = 0; i < hidden; ++i) mixed.collapsed[i] += mixed.pre[j] * f[j * hidden + i];
  }
  if (scale.size() == 1) return mixed;
  for (size_t k = 0; k < n; ++k) {
    mixed.post.push_back(2 * sigmoid(m[n + k] * scale[1] + base[n + k]));
  }
  Row c(n * n);
  for (size_t j = 0; j < n; ++j) {
    double sum = 0;
    for (size_t k = 0; k < n; ++k) {
      const size_t at = 2 * n + j * n + k;
      sum += c[j * n + k] = std::exp(m[at] * scale[2] + base[at]);
    }
    for (size_t k = 0; k < n; ++k) c[j * n + k] = c[j * n + k] / sum + eps;
  }
  const auto normalise = [&](bool rows) {
    for (size_t a = 0; a < n; ++a) {
      double sum = 0;
      for (size_t b = 0; b < n; ++b) sum += c[rows ? a * n + b : b * n + a];
      for (size_t b = 0; b < n; ++b) c[rows ? a * n + b : b * n + a] /= sum + eps;
    }
  };
  normalise(/*rows=*/false);
  for (int i = 1; i < iterations; ++i) normalise(true), normalise(false);
  mixed.comb = c;
  return mixed;
}

struct Site {
  Site(ThreadPool& pool, int32_t streams, int64_t hidden, bool head = false)
      : num_streams(streams), hidden_size(hidden), is_head(head) {
    const int64_t mixes = head ? streams : streams * (2 + streams);
    fn = MakeWeight({"", DType::kFloat32}, mixes, streams * hidden, 3);
    base = RandomFloats(mixes, 4);
    scale = head ? std::vector<float>{0.7f} : std::vector<float>{0.7f, 1.3f, 0.4f};
    packed = PackLinear(pool, {fn.tensor}).value();
  }

  // Into post, comb and collapsed.
  absl::Status Pre(ThreadPool& pool, const std::vector<float>& streams, int32_t rows) {
    mixes.assign(static_cast<size_t>(rows * packed->out_features()), 0);
    post.assign(static_cast<size_t>(rows * num_streams), 0);
    comb.assign(static_cast<size_t>(rows * num_streams * num_streams), 0);
    collapsed.assign(static_cast<size_t>(rows * hidden_size), 0);
    return HyperPre(pool, {.num_rows = rows,
                           .num_streams = num_streams,
                           .hidden_size = hidden_size,
                           .streams = streams.data(),
                           .fn = packed.get(),
                           .base = base.data(),
                           .scale = scale.data(),
                           .norm_eps = 1e-3f,
                           .eps = 1e-4f,
                           .sinkhorn_iters = iterations,
                           .mixes = mixes.data(),
                           .output = collapsed.data(),
                           .post = is_head ? nullptr : post.data(),
                           .comb = is_head ? nullptr : comb.data()});
  }
  Mixed Reference(const std::vector<float>& streams, int32_t row) const {
    const auto begin = streams.begin() + row * num_streams * hidden_size;
    return MixReference(fn, base, scale, Row(begin, begin + num_streams * hidden_size),
                        static_cast<size_t>(num_streams), iterations, 1e-3, 1e-4);
  }

  int32_t num_streams;
  int64_t hidden_size;
  bool is_head;
  int32_t iterations = 20;
  TestWeight fn;
  std::vector<float> base, scale;
  std::unique_ptr<PackedLinear> packed;
  std::vector<float> mixes, post, comb, collapsed;
};

template <typename T>
absl::Span<const T> Part(const std::vector<T>& values, size_t row, size_t width) {
  return absl::MakeConstSpan(values).subspan(row * width, width);
}

// Chains of tens of float operations on values of about 1.
constexpr numerics::Tolerance kTolerance = {.abs = 2e-5, .rel = 2e-5};

TEST(HyperConnectionTest, EqualsTheDoubleReference) {
  ThreadPool pool(3);
  struct Shape {
    int32_t streams;
    int64_t hidden;
    int32_t iterations;
    int32_t rows;
  };
  for (const Shape& shape :
       {Shape{4, 64, 20, 9}, {4, 96, 1, 1}, {1, 7, 2, 3}, {3, 33, 5, 40}, {kMaxStreams, 5, 3, 2}}) {
    Site site(pool, shape.streams, shape.hidden);
    site.iterations = shape.iterations;
    std::vector<float> streams = RandomFloats(shape.rows * shape.streams * shape.hidden, 5);
    const std::vector<float> before = streams;
    const std::vector<float> y = RandomFloats(shape.rows * shape.hidden, 6);
    ASSERT_TRUE(site.Pre(pool, streams, shape.rows).ok());
    ASSERT_TRUE(HyperPost(pool, {.num_rows = shape.rows,
                                 .num_streams = shape.streams,
                                 .hidden_size = shape.hidden,
                                 .block_output = y.data(),
                                 .post = site.post.data(),
                                 .comb = site.comb.data(),
                                 .streams = streams.data()})
                    .ok());
    const auto n = static_cast<size_t>(shape.streams);
    const auto hidden = static_cast<size_t>(shape.hidden);
    for (int32_t r = 0; r < shape.rows; ++r) {
      const auto row = static_cast<size_t>(r);
      const Mixed expected = site.Reference(before, r);
      EXPECT_TRUE(numerics::AllClose(Part(site.post, row, n), absl::MakeConstSpan(expected.post),
                                     kTolerance));
      EXPECT_TRUE(numerics::AllClose(Part(site.comb, row, n * n),
                                     absl::MakeConstSpan(expected.comb), kTolerance));
      EXPECT_TRUE(numerics::AllClose(Part(site.collapsed, row, hidden),
                                     absl::MakeConstSpan(expected.collapsed), kTolerance));
      Row after(n * hidden);
      for (size_t k = 0; k < n; ++k) {
        for (size_t i = 0; i < hidden; ++i) {
          double sum = expected.post[k] * y[row * hidden + i];
          for (size_t j = 0; j < n; ++j) {
            // The first index of comb is the stream that is read.
            sum += expected.comb[j * n + k] * before[(row * n + j) * hidden + i];
          }
          after[k * hidden + i] = sum;
        }
      }
      EXPECT_TRUE(numerics::AllClose(Part(streams, row, n * hidden), absl::MakeConstSpan(after),
                                     kTolerance))
          << shape.streams << " streams, row " << r;
    }
  }
}

TEST(HyperConnectionTest, TheHeadOnlyCollapses) {
  ThreadPool pool(2);
  Site site(pool, 4, 33, /*head=*/true);
  const std::vector<float> streams = RandomFloats(5 * 4 * 33, 7);
  ASSERT_TRUE(site.Pre(pool, streams, 5).ok());
  for (int32_t r = 0; r < 5; ++r) {
    const Mixed expected = site.Reference(streams, r);
    EXPECT_TRUE(numerics::AllClose(Part(site.collapsed, static_cast<size_t>(r), 33),
                                   absl::MakeConstSpan(expected.collapsed), kTolerance));
  }
}

TEST(HyperConnectionTest, CombIsDoublyStochastic) {
  ThreadPool pool(1);
  Site site(pool, 4, 64);
  site.scale[2] = 0.05f;  // logits of about 1: farther apart, 20 steps do not suffice
  const std::vector<float> streams = RandomFloats(8 * 4 * 64, 8);
  ASSERT_TRUE(site.Pre(pool, streams, 8).ok());
  for (size_t row = 0; row < 8; ++row) {
    for (size_t a = 0; a < 4; ++a) {
      double of_row = 0, of_column = 0;
      for (size_t b = 0; b < 4; ++b) {
        of_row += site.comb[row * 16 + a * 4 + b];
        of_column += site.comb[row * 16 + b * 4 + a];
      }
      EXPECT_NEAR(of_row, 1, 1e-3);
      EXPECT_NEAR(of_column, 1, 1e-3);
    }
  }
}

TEST(HyperConnectionTest, ARowHasTheSameBitsInEveryBatch) {
  ThreadPool pool(3), one(1);
  Site site(pool, 4, 70);
  constexpr int32_t kRows = 40;
  const std::vector<float> streams = RandomFloats(kRows * 4 * 70, 9);
  std::vector<float> collapsed, comb;
  for (int32_t r = 0; r < kRows; ++r) {
    const auto begin = streams.begin() + r * 280;
    ASSERT_TRUE(site.Pre(one, std::vector<float>(begin, begin + 280), 1).ok());
    collapsed.insert(collapsed.end(), site.collapsed.begin(), site.collapsed.end());
    comb.insert(comb.end(), site.comb.begin(), site.comb.end());
  }
  for (const int32_t rows : {2, 3, 7, 40}) {
    ASSERT_TRUE(site.Pre(pool, streams, rows).ok());
    EXPECT_TRUE(
        numerics::BitEqual(site.collapsed, absl::MakeConstSpan(collapsed).subspan(0, rows * 70)));
    EXPECT_TRUE(numerics::BitEqual(site.comb, absl::MakeConstSpan(comb).subspan(0, rows * 16)));
  }
}

TEST(HyperConnectionTest, NamesWhatDoesNotFit) {
  ThreadPool pool(1);
  Site site(pool, 4, 8);
  const std::vector<float> streams(64);
  const auto message = [&] {
    const absl::Status status = site.Pre(pool, streams, 2);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  site.hidden_size = 7;
  EXPECT_THAT(message(), HasSubstr("needs fn [24, 28], has [24, 32]"));
  site.hidden_size = 8;
  site.is_head = true;
  EXPECT_THAT(message(), HasSubstr("needs fn [4, 32], has [24, 32]"));
  site.is_head = false;
  site.iterations = 0;
  EXPECT_THAT(message(), HasSubstr("sinkhorn_iters 0"));
  site.iterations = 1;
  site.num_streams = kMaxStreams + 1;
  EXPECT_THAT(message(), HasSubstr("17 streams (1 to 16)"));
}

}  // namespace
}  // namespace kernels::cpu

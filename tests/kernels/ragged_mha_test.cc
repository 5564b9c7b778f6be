#include "kernels/cpu/ragged_mha.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Dims {
  int32_t heads, nope, rope, v;
};

// Queries, keys and values of a batch with padded strides; outputs start as NaN, padding stays.
struct Batch {
  Batch(const Dims& dims, std::vector<int32_t> q_lens, std::vector<int32_t> kv_lens, uint32_t seed)
      : dims(dims), q_lens(std::move(q_lens)), kv_lens(std::move(kv_lens)) {
    cu_q.push_back(0);
    cu_kv.push_back(0);
    for (const int32_t n : this->q_lens) cu_q.push_back(cu_q.back() + n);
    for (const int32_t n : this->kv_lens) cu_kv.push_back(cu_kv.back() + n);
    const int32_t rows = cu_q.back(), keys = cu_kv.back();
    // q holds nope and rope side by side, as does k with v: pointers into one tensor, with padding.
    q_head_stride = dims.nope + dims.rope + 1;
    q_row_stride = dims.heads * q_head_stride + 3;
    kv_head_stride = dims.nope + dims.v + 2;
    kv_row_stride = dims.heads * kv_head_stride + 1;
    rope_row_stride = dims.rope + 4;
    out_head_stride = dims.v + 1;
    out_row_stride = dims.heads * out_head_stride + 2;
    lse_stride = rows + 5;
    q = RandomTensor(rows * q_row_stride, seed);
    kv = RandomTensor(keys * kv_row_stride, seed + 1);
    k_rope = RandomTensor(keys * rope_row_stride, seed + 2);
    out.assign(rows * out_row_stride, kNan);
    lse.assign(dims.heads * lse_stride, kNan);
  }

  RaggedMhaParams Params() {
    RaggedMhaParams p;
    p.num_seqs = static_cast<int32_t>(q_lens.size());
    p.num_rows = cu_q.back();
    p.num_heads = dims.heads;
    p.qk_nope_head_dim = dims.nope;
    p.qk_rope_head_dim = dims.rope;
    p.v_head_dim = dims.v;
    p.softmax_scale = 0.3f;
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_kv = cu_kv.data();
    p.q_nope = q.data();
    p.q_nope_row_stride = q_row_stride;
    p.q_nope_head_stride = q_head_stride;
    p.q_rope = q.data() + dims.nope;
    p.q_rope_row_stride = q_row_stride;
    p.q_rope_head_stride = q_head_stride;
    p.k_nope = kv.data();
    p.k_nope_row_stride = kv_row_stride;
    p.k_nope_head_stride = kv_head_stride;
    p.k_rope = k_rope.data();
    p.k_rope_row_stride = rope_row_stride;
    p.v = kv.data() + dims.nope;
    p.v_row_stride = kv_row_stride;
    p.v_head_stride = kv_head_stride;
    p.out = out.data();
    p.out_row_stride = out_row_stride;
    p.out_head_stride = out_head_stride;
    p.lse = lse.data();
    p.lse_stride = lse_stride;
    return p;
  }

  const float* OutOf(int32_t row, int32_t head) const {
    return out.data() + row * out_row_stride + head * out_head_stride;
  }
  float LseOf(int32_t row, int32_t head) const { return lse[head * lse_stride + row]; }
  // [rows, heads, v] and then [rows, heads].
  std::vector<float> Results() const {
    std::vector<float> values;
    for (int32_t row = 0; row < cu_q.back(); ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) {
        values.insert(values.end(), OutOf(row, h), OutOf(row, h) + dims.v);
      }
    }
    for (int32_t row = 0; row < cu_q.back(); ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) values.push_back(LseOf(row, h));
    }
    return values;
  }

  // The same in double, plainly.  Keys [0, i + offset] of a row, as many as there are.
  std::vector<double> Reference(const std::vector<int32_t>& offsets = {}) {
    const RaggedMhaParams p = Params();
    std::vector<double> values, lses;
    for (size_t s = 0; s < q_lens.size(); ++s) {
      const int64_t offset = offsets.empty() ? kv_lens[s] - q_lens[s] : offsets[s];
      for (int64_t i = 0; i < q_lens[s]; ++i) {
        for (int64_t h = 0; h < dims.heads; ++h) {
          const int64_t row = cu_q[s] + i;
          std::vector<double> scores;
          double sum = 0;
          for (int64_t j = 0; j < kv_lens[s] && j <= i + offset; ++j) {
            const int64_t key = cu_kv[s] + j;
            double dot = 0;
            for (int64_t d = 0; d < dims.nope; ++d) {
              dot += static_cast<double>(q[row * q_row_stride + h * q_head_stride + d]) *
                     kv[key * kv_row_stride + h * kv_head_stride + d];
            }
            for (int64_t d = 0; d < dims.rope; ++d) {
              dot +=
                  static_cast<double>(q[row * q_row_stride + h * q_head_stride + dims.nope + d]) *
                  k_rope[key * rope_row_stride + d];
            }
            scores.push_back(p.softmax_scale * dot);
            sum += std::exp(scores.back());
          }
          lses.push_back(scores.empty() ? -kInfinity : std::log(sum));
          for (int64_t d = 0; d < dims.v; ++d) {
            double o = 0;
            for (size_t j = 0; j < scores.size(); ++j) {
              o += std::exp(scores[j]) / sum *
                   kv[(cu_kv[s] + j) * kv_row_stride + h * kv_head_stride + dims.nope + d];
            }
            values.push_back(o);
          }
        }
      }
    }
    values.insert(values.end(), lses.begin(), lses.end());
    return values;
  }

  Dims dims;
  std::vector<int32_t> q_lens, kv_lens, cu_q, cu_kv;
  int64_t q_row_stride, q_head_stride, kv_row_stride, kv_head_stride, rope_row_stride;
  int64_t out_row_stride, out_head_stride, lse_stride;
  std::vector<float> q, kv, k_rope, out, lse;
};

// Scores reach about 30, a sum of 192 products: float32 rounding of them is what differs.
constexpr numerics::Tolerance kTolerance{.abs = 5e-6, .rel = 2e-5, .cosine = 1e-10};

const Dims kSizes[] = {
    {2, 128, 64, 128}, {3, 24, 8, 20}, {1, 7, 2, 5}, {2, 16, 0, 9}, {1, 0, 6, 8}};

TEST(RaggedMhaTest, EqualsTheReference) {
  ThreadPool pool(2);
  for (const Dims& dims : kSizes) {
    SCOPED_TRACE(dims.nope);
    // One token; a prefix; tile edges; a sequence without rows, without keys, without both; more
    // rows than keys (the first see nothing).
    Batch batch(dims, {1, 5, 63, 64, 65, 0, 3, 0, 7, 130}, {1, 70, 63, 64, 65, 9, 0, 0, 4, 200},
                11);
    ASSERT_TRUE(RaggedMha(pool, batch.Params()).ok());
    EXPECT_TRUE(AllClose(batch.Results(), batch.Reference(), kTolerance));
    // Padding is not written.
    EXPECT_TRUE(std::isnan(batch.out.back()));
    EXPECT_TRUE(std::isnan(batch.out[dims.v]));
    EXPECT_TRUE(std::isnan(batch.lse.back()));
  }
}

TEST(RaggedMhaTest, CausalOffsetsSayWhatARowSees) {
  ThreadPool pool(2);
  Batch batch({2, 12, 4, 8}, {6, 6, 6, 6}, {10, 10, 10, 10}, 3);
  const std::vector<int32_t> offsets = {0, -3, 1000000, -100};
  RaggedMhaParams params = batch.Params();
  params.causal_offset = offsets.data();
  ASSERT_TRUE(RaggedMha(pool, params).ok());
  EXPECT_TRUE(AllClose(batch.Results(), batch.Reference(offsets), kTolerance));
  EXPECT_EQ(batch.LseOf(6 + 2, 0), -kInfinity);  // row 2 with offset -3
  EXPECT_NE(batch.LseOf(6 + 3, 0), -kInfinity);
}

TEST(RaggedMhaTest, NothingUnseenLeaksIn) {
  ThreadPool pool(2);
  // Row i of 100 sees keys [0, i]; keys past them, other rows and padding turn into NaN.
  Batch clean({2, 20, 6, 12}, {100, 3}, {100, 80}, 5);
  ASSERT_TRUE(RaggedMha(pool, clean.Params()).ok());
  for (const int32_t row : {0, 1, 17, 62, 63, 64, 98}) {
    SCOPED_TRACE(row);
    Batch poisoned({2, 20, 6, 12}, {100, 3}, {100, 80}, 5);
    for (int64_t key = row + 1; key < 180; ++key) {
      std::fill_n(poisoned.kv.begin() + key * poisoned.kv_row_stride, poisoned.kv_row_stride, kNan);
      std::fill_n(poisoned.k_rope.begin() + key * poisoned.rope_row_stride,
                  poisoned.rope_row_stride, kNan);
    }
    for (int64_t other = 0; other < 103; ++other) {
      if (other != row) {
        std::fill_n(poisoned.q.begin() + other * poisoned.q_row_stride, poisoned.q_row_stride,
                    kNan);
      }
    }
    ASSERT_TRUE(RaggedMha(pool, poisoned.Params()).ok());
    for (int32_t h = 0; h < 2; ++h) {
      EXPECT_TRUE(BitEqual(absl::MakeConstSpan(poisoned.OutOf(row, h), 12),
                           absl::MakeConstSpan(clean.OutOf(row, h), 12)));
      EXPECT_EQ(poisoned.LseOf(row, h), clean.LseOf(row, h));
    }
  }
}

TEST(RaggedMhaTest, ASeenNanIsNotHidden) {
  ThreadPool pool(1);
  Batch batch({1, 8, 0, 8}, {20}, {20}, 5);
  batch.kv[5 * batch.kv_row_stride] = kNan;  // key 5
  ASSERT_TRUE(RaggedMha(pool, batch.Params()).ok());
  EXPECT_FALSE(std::isnan(*batch.OutOf(4, 0)));
  EXPECT_TRUE(std::isnan(*batch.OutOf(5, 0)));
  EXPECT_TRUE(std::isnan(*batch.OutOf(19, 0)));
}

TEST(RaggedMhaTest, ASequencesBitsDoNotDependOnItsBatchOrOnThreads) {
  const Dims dims{3, 24, 8, 20};
  ThreadPool many(3), one(1);
  Batch batch(dims, {70, 1, 5, 66}, {90, 40, 5, 66}, 21);
  ASSERT_TRUE(RaggedMha(many, batch.Params()).ok());
  for (size_t s = 0; s < 4; ++s) {
    Batch alone(dims, {batch.q_lens[s]}, {batch.kv_lens[s]}, 0);
    std::copy_n(batch.q.begin() + batch.cu_q[s] * batch.q_row_stride, alone.q.size(),
                alone.q.begin());
    std::copy_n(batch.kv.begin() + batch.cu_kv[s] * batch.kv_row_stride, alone.kv.size(),
                alone.kv.begin());
    std::copy_n(batch.k_rope.begin() + batch.cu_kv[s] * batch.rope_row_stride, alone.k_rope.size(),
                alone.k_rope.begin());
    ASSERT_TRUE(RaggedMha(one, alone.Params()).ok());
    for (int32_t i = 0; i < batch.q_lens[s]; ++i) {
      for (int32_t h = 0; h < dims.heads; ++h) {
        ASSERT_TRUE(BitEqual(absl::MakeConstSpan(alone.OutOf(i, h), dims.v),
                             absl::MakeConstSpan(batch.OutOf(batch.cu_q[s] + i, h), dims.v)));
        ASSERT_EQ(alone.LseOf(i, h), batch.LseOf(batch.cu_q[s] + i, h));
      }
    }
  }
}

// One sequence of `length` tokens, attended in chunks that end at `ends`, keys coming in pieces
// from absolute multiples of `piece`.  This is what a model's prefill does.
std::vector<float> Chunked(ThreadPool& pool, Batch batch, const std::vector<int32_t>& ends,
                           int32_t piece) {
  int32_t done = 0;
  for (const int32_t end : ends) {
    const int32_t q_len = end - done;
    for (int32_t begin = 0; begin < end; begin += piece) {
      const int32_t kv_len = std::min(piece, end - begin);
      const std::vector<int32_t> cu_q = {0, q_len}, cu_kv = {0, kv_len};
      const int32_t offset = done - begin;
      const int32_t q_row_begin = done;
      RaggedMhaParams params = batch.Params();
      params.num_rows = q_len;
      params.cu_seqlens_q = cu_q.data();
      params.cu_seqlens_kv = cu_kv.data();
      params.causal_offset = &offset;
      params.q_row_begin = &q_row_begin;
      params.k_nope = static_cast<const float*>(params.k_nope) + begin * batch.kv_row_stride;
      params.k_rope = static_cast<const float*>(params.k_rope) + begin * batch.rope_row_stride;
      params.v = static_cast<const float*>(params.v) + begin * batch.kv_row_stride;
      params.accumulate = begin > 0;
      EXPECT_TRUE(RaggedMha(pool, params).ok());
    }
    done = end;
  }
  return batch.Results();
}

TEST(RaggedMhaTest, ChunkedEqualsWholeBitForBit) {
  ThreadPool pool(2);
  const int32_t length = 333;
  const Batch batch({2, 40, 12, 36}, {length}, {length}, 31);
  for (const int32_t piece : {48, 64, 100, 512}) {
    SCOPED_TRACE(piece);
    const std::vector<float> whole = Chunked(pool, batch, {length}, piece);
    EXPECT_TRUE(AllClose(whole, Batch(batch).Reference(), kTolerance));
    EXPECT_TRUE(BitEqual(Chunked(pool, batch, {1, 2, 5, 64, 65, 200, length}, piece), whole));
    EXPECT_TRUE(BitEqual(Chunked(pool, batch, {100, length - 1, length}, piece), whole));
    std::vector<int32_t> singles(length);
    for (int32_t i = 0; i < length; ++i) singles[i] = i + 1;
    EXPECT_TRUE(BitEqual(Chunked(pool, batch, singles, piece), whole));
  }
}

TEST(RaggedMhaTest, AccumulatingOnNothingIsTheResultItself) {
  ThreadPool pool(2);
  Batch batch({2, 12, 4, 8}, {9}, {30}, 8);
  ASSERT_TRUE(RaggedMha(pool, batch.Params()).ok());
  const std::vector<float> plain = batch.Results();
  batch.out.assign(batch.out.size(), kNan);
  batch.lse.assign(batch.lse.size(), -kInfinity);
  RaggedMhaParams params = batch.Params();
  params.accumulate = true;
  ASSERT_TRUE(RaggedMha(pool, params).ok());
  EXPECT_TRUE(BitEqual(batch.Results(), plain));
  // A piece of which nothing is seen leaves everything as it was.
  const int32_t offset = -1000;
  params.causal_offset = &offset;
  ASSERT_TRUE(RaggedMha(pool, params).ok());
  EXPECT_TRUE(BitEqual(batch.Results(), plain));
}

TEST(RaggedMhaTest, LargeScoresDoNotOverflow) {
  ThreadPool pool(1);
  Batch batch({1, 32, 0, 8}, {40}, {40}, 77);
  for (float& value : batch.q) value *= 100;
  ASSERT_TRUE(RaggedMha(pool, batch.Params()).ok());
  for (const float value : batch.Results()) EXPECT_TRUE(std::isfinite(value));
  // The best key takes all: the output is close to its value even where scores are rounded.
  for (int32_t row = 0; row < 40; ++row) EXPECT_GT(batch.LseOf(row, 0), -1e5f);
}

TEST(RaggedMhaTest, LseMayBeNull) {
  ThreadPool pool(1);
  Batch batch({2, 12, 4, 8}, {9}, {30}, 8);
  RaggedMhaParams params = batch.Params();
  ASSERT_TRUE(RaggedMha(pool, params).ok());
  const std::vector<float> out = batch.out;
  params.lse = nullptr;
  ASSERT_TRUE(RaggedMha(pool, params).ok());
  EXPECT_TRUE(BitEqual(batch.out, out));
}

TEST(RaggedMhaTest, RefusesWhatCannotBe) {
  ThreadPool pool(1);
  Batch batch({2, 12, 4, 8}, {9, 2}, {30, 2}, 8);
  const auto expect_refused = [&](auto change) {
    RaggedMhaParams params = batch.Params();
    change(params);
    EXPECT_EQ(RaggedMha(pool, params).code(), absl::StatusCode::kInvalidArgument);
  };
  const std::vector<int32_t> falling = {0, 9, 8}, late = {1, 9, 11};
  const std::vector<int32_t> negative = {0, -1};
  expect_refused([](RaggedMhaParams& p) { p.num_seqs = -1; });
  expect_refused([](RaggedMhaParams& p) { p.num_heads = 0; });
  expect_refused([](RaggedMhaParams& p) { ++p.num_rows; });
  expect_refused([](RaggedMhaParams& p) { p.v_head_dim = 0; });
  expect_refused([](RaggedMhaParams& p) { p.qk_nope_head_dim = p.qk_rope_head_dim = 0; });
  expect_refused([](RaggedMhaParams& p) { p.v = nullptr; });
  expect_refused([](RaggedMhaParams& p) { p.k_rope = nullptr; });
  expect_refused([](RaggedMhaParams& p) { p.lse = nullptr, p.accumulate = true; });
  expect_refused([&](RaggedMhaParams& p) { p.cu_seqlens_q = falling.data(); });
  expect_refused([&](RaggedMhaParams& p) { p.cu_seqlens_kv = late.data(); });
  expect_refused([&](RaggedMhaParams& p) { p.q_row_begin = negative.data(); });
  expect_refused([](RaggedMhaParams& p) { p.kv_dtype = DType::kBfloat16; });
  expect_refused([](RaggedMhaParams& p) { p.out = nullptr; });
  uint16_t rounded = 0;
  expect_refused([&](RaggedMhaParams& p) { p.rounded_out = &rounded; });
  expect_refused([&](RaggedMhaParams& p) { p.out = nullptr, p.rounded_out = &rounded; });
  EXPECT_THAT(batch.out, ::testing::Each(::testing::IsNan()));
}

}  // namespace
}  // namespace kernels::cpu

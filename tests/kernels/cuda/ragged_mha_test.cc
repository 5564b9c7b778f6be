#include "kernels/ragged_mha.h"

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Scores reach about 30, a sum of 192 products: float32 rounding of them is what differs.
constexpr numerics::Tolerance kTolerance{.abs = 1e-5, .rel = 4e-5, .cosine = 1e-10};

struct Dims {
  int32_t heads, nope, rope, v;
};

// Queries, keys and values of a batch in host memory, with padded strides.
struct Batch {
  Batch(const Dims& dims, const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens,
        uint32_t seed)
      : cu_q{0}, cu_kv{0} {
    for (const int32_t n : q_lens) cu_q.push_back(cu_q.back() + n);
    for (const int32_t n : kv_lens) cu_kv.push_back(cu_kv.back() + n);
    params.num_seqs = static_cast<int32_t>(q_lens.size());
    params.num_rows = cu_q.back();
    params.num_heads = dims.heads;
    params.qk_nope_head_dim = dims.nope;
    params.qk_rope_head_dim = dims.rope;
    params.v_head_dim = dims.v;
    params.softmax_scale = 0.3f;
    params.q_nope_head_stride = params.q_rope_head_stride = dims.nope + dims.rope + 1;
    params.q_nope_row_stride = params.q_rope_row_stride =
        dims.heads * params.q_nope_head_stride + 3;
    params.k_nope_head_stride = params.v_head_stride = dims.nope + dims.v + 2;
    params.k_nope_row_stride = params.v_row_stride = dims.heads * params.k_nope_head_stride + 1;
    params.k_rope_row_stride = dims.rope + 4;
    params.out_head_stride = dims.v + 1;
    params.out_row_stride = dims.heads * params.out_head_stride + 2;
    params.lse_stride = params.num_rows + 5;
    q = RandomTensor(params.num_rows * params.q_nope_row_stride, seed);
    kv = RandomTensor(cu_kv.back() * params.k_nope_row_stride, seed + 1);
    k_rope = RandomTensor(cu_kv.back() * params.k_rope_row_stride, seed + 2);
    out.assign(params.num_rows * params.out_row_stride, kNan);
    lse.assign(dims.heads * params.lse_stride, kNan);
  }

  RaggedMhaParams params;  // without pointers
  std::vector<int32_t> cu_q, cu_kv;
  std::vector<float> q, kv, k_rope, out, lse;
};

class CudaRaggedMhaTest : public DeviceTest {
 protected:
  // Pointers of the host's arrays.
  static RaggedMhaParams HostParams(Batch& batch) {
    RaggedMhaParams params = batch.params;
    params.cu_seqlens_q = batch.cu_q.data();
    params.cu_seqlens_kv = batch.cu_kv.data();
    Point(params, batch.q.data(), batch.kv.data(), batch.k_rope.data());
    params.out = batch.out.data();
    params.lse = batch.lse.data();
    return params;
  }
  // Pointers of copies on the device.
  RaggedMhaParams DeviceParams(const Batch& batch) {
    RaggedMhaParams params = batch.params;
    params.cu_seqlens_q = Upload(batch.cu_q);
    params.cu_seqlens_kv = Upload(batch.cu_kv);
    Point(params, Upload(batch.q), Upload(batch.kv), Upload(batch.k_rope));
    params.out = Upload(batch.out);
    params.lse = Upload(batch.lse);
    return params;
  }
  static void Point(RaggedMhaParams& params, const float* q, const float* kv, const float* k_rope) {
    params.q_nope = q;
    params.q_rope = q + params.qk_nope_head_dim;
    params.k_nope = kv;
    params.v = kv + params.qk_nope_head_dim;
    params.k_rope = k_rope;
  }
  void ExpectClose(const Batch& batch, const RaggedMhaParams& device) {
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out, kTolerance));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse, kTolerance));
  }
};

TEST_F(CudaRaggedMhaTest, EqualsTheCpu) {
  const Dims sizes[] = {{2, 128, 64, 128}, {3, 24, 8, 20}, {1, 7, 2, 5},
                        {2, 16, 0, 9},     {1, 0, 6, 8},   {1, 70, 66, 130}};
  for (const Dims& dims : sizes) {
    SCOPED_TRACE(dims.nope);
    // One token; a prefix; tile edges; a sequence without rows, without keys, without both; more
    // rows than keys (the first see nothing).
    Batch batch(dims, {1, 5, 15, 16, 17, 0, 3, 0, 7, 50}, {1, 70, 31, 32, 33, 9, 0, 0, 4, 120}, 11);
    const RaggedMhaParams device = DeviceParams(batch);
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    ASSERT_TRUE(host_->attention().RaggedMha({}, HostParams(batch)).ok());
    ExpectClose(batch, device);  // NaN where nothing is written
    const std::vector<float> once = Download(device.out, batch.out.size());
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    EXPECT_TRUE(BitEqual(Download(device.out, batch.out.size()), once));
  }
}

TEST_F(CudaRaggedMhaTest, RoundedOutIsTheResultInBfloat16) {
  const Batch batch({3, 24, 8, 20}, {1, 5, 0, 33}, {70, 3, 9, 40}, 13);
  RaggedMhaParams device = DeviceParams(batch);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  const std::vector<float> exact = Download(device.out, batch.out.size());
  device.out = nullptr;
  device.rounded_out = Upload(std::vector<uint16_t>(batch.out.size(), kUntouched));
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  EXPECT_EQ(Download(device.rounded_out, batch.out.size()), RoundWritten(exact));
}

TEST_F(CudaRaggedMhaTest, CausalOffsetsAndAccumulationEqualTheCpu) {
  Batch batch({2, 12, 4, 8}, {20, 6, 6, 6}, {40, 10, 10, 10}, 3);
  const std::vector<int32_t> offsets = {7, -3, 1000000, -100}, row_begin = {0, 20, 26, 32};
  RaggedMhaParams device = DeviceParams(batch), host = HostParams(batch);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  ASSERT_TRUE(host_->attention().RaggedMha({}, host).ok());
  // Other keys for the same rows, merged with what is there.
  device.accumulate = host.accumulate = true;
  host.causal_offset = offsets.data();
  host.q_row_begin = row_begin.data();
  device.causal_offset = Upload(offsets);
  device.q_row_begin = Upload(row_begin);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  ASSERT_TRUE(host_->attention().RaggedMha({}, host).ok());
  ExpectClose(batch, device);
}

TEST_F(CudaRaggedMhaTest, NothingUnseenLeaksIn) {
  // Row i of 40 sees keys [0, i]; keys past them, other rows and padding turn into NaN.
  Batch clean({2, 20, 6, 12}, {40, 3}, {40, 50}, 5);
  const RaggedMhaParams clean_params = DeviceParams(clean);
  ASSERT_TRUE(device_->attention().RaggedMha({}, clean_params).ok());
  const std::vector<float> expected = Download(clean_params.out, clean.out.size());
  const int64_t stride = clean.params.out_row_stride;
  for (const int32_t row : {0, 1, 15, 31, 38}) {
    SCOPED_TRACE(row);
    Batch poisoned({2, 20, 6, 12}, {40, 3}, {40, 50}, 5);
    const RaggedMhaParams& p = poisoned.params;
    std::fill(poisoned.kv.begin() + (row + 1) * p.k_nope_row_stride, poisoned.kv.end(), kNan);
    std::fill(poisoned.k_rope.begin() + (row + 1) * p.k_rope_row_stride, poisoned.k_rope.end(),
              kNan);
    for (int64_t other = 0; other < 43; ++other) {
      if (other == row) continue;
      std::fill_n(poisoned.q.begin() + other * p.q_nope_row_stride, p.q_nope_row_stride, kNan);
    }
    const RaggedMhaParams device = DeviceParams(poisoned);
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    EXPECT_TRUE(BitEqual(absl::MakeConstSpan(Download(device.out, poisoned.out.size()))
                             .subspan(row * stride, stride),
                         absl::MakeConstSpan(expected).subspan(row * stride, stride)));
  }
}

// One sequence attended in chunks, keys coming in pieces from absolute multiples of `piece`: what a
// model's prefill does.
TEST_F(CudaRaggedMhaTest, ChunkedEqualsWholeBitForBit) {
  constexpr int32_t kLength = 130, kPiece = 48;
  const Batch batch({2, 40, 12, 36}, {kLength}, {kLength}, 31);
  const auto run = [&](const std::vector<int32_t>& ends) {
    RaggedMhaParams params = DeviceParams(batch);
    const auto* k_nope = static_cast<const float*>(params.k_nope);
    const auto* k_rope = static_cast<const float*>(params.k_rope);
    const auto* v = static_cast<const float*>(params.v);
    int32_t done = 0;
    for (const int32_t end : ends) {
      for (int32_t begin = 0; begin < end; begin += kPiece) {
        params.num_rows = end - done;
        params.cu_seqlens_q = Upload<int32_t>({0, end - done});
        params.cu_seqlens_kv = Upload<int32_t>({0, std::min(kPiece, end - begin)});
        params.causal_offset = Upload<int32_t>({done - begin});
        params.q_row_begin = Upload<int32_t>({done});
        params.k_nope = k_nope + begin * params.k_nope_row_stride;
        params.k_rope = k_rope + begin * params.k_rope_row_stride;
        params.v = v + begin * params.v_row_stride;
        params.accumulate = begin > 0;
        EXPECT_TRUE(device_->attention().RaggedMha({}, params).ok());
      }
      done = end;
    }
    return Download(params.out, batch.out.size());
  };
  const std::vector<float> whole = run({kLength});
  EXPECT_TRUE(BitEqual(run({1, 2, 5, 48, 49, 100, kLength}), whole));
  EXPECT_TRUE(BitEqual(run({64, 129, kLength}), whole));
}

TEST_F(CudaRaggedMhaTest, LargeScoresDoNotOverflow) {
  Batch batch({1, 32, 0, 8}, {40}, {40}, 77);
  for (float& value : batch.q) value *= 1e4f;
  const RaggedMhaParams device = DeviceParams(batch);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  const std::vector<float> out = Download(device.out, batch.out.size());
  for (int64_t row = 0; row < 40; ++row) {
    for (int64_t d = 0; d < 8; ++d) {
      EXPECT_TRUE(std::isfinite(out[row * batch.params.out_row_stride + d]));
    }
  }
}

TEST_F(CudaRaggedMhaTest, RefusesWhatCannotBe) {
  Batch batch({1, 8, 0, 8}, {4}, {4}, 1);
  RaggedMhaParams params = DeviceParams(batch);
  params.v = nullptr;
  EXPECT_EQ(device_->attention().RaggedMha({}, params).code(), absl::StatusCode::kInvalidArgument);
  params = DeviceParams(batch);
  params.rounded_out = reinterpret_cast<uint16_t*>(params.out);
  EXPECT_EQ(device_->attention().RaggedMha({}, params).code(), absl::StatusCode::kInvalidArgument);
  params.out = nullptr;
  params.accumulate = true;
  EXPECT_EQ(device_->attention().RaggedMha({}, params).code(), absl::StatusCode::kInvalidArgument);
  params = DeviceParams(batch);
  params.v_head_dim = 1 << 20;
  EXPECT_EQ(device_->attention().RaggedMha({}, params).code(), absl::StatusCode::kInvalidArgument);
}

// Keys and values in bf16 on a device that rounds: heads of 128 + 64 and 128 go another way.
class CudaFlashMhaTest : public DeviceTest {
 protected:
  CudaFlashMhaTest() : DeviceTest(/*bfloat16=*/true) {}

  static uint16_t Round(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static std::vector<uint16_t> Round(const std::vector<float>& values) {
    std::vector<uint16_t> rounded(values.size());
    for (size_t i = 0; i < values.size(); ++i) rounded[i] = Round(values[i]);
    return rounded;
  }
  // A batch whose queries, keys and values are bf16 numbers.  `dense`: strides that the copy engine
  // takes.
  static Batch MakeBatch(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens,
                         uint32_t seed, bool dense = true) {
    Batch batch({3, 128, 64, 128}, q_lens, kv_lens, seed);
    if (dense) {
      RaggedMhaParams& p = batch.params;
      p.q_nope_head_stride = p.q_rope_head_stride = 196;
      p.q_nope_row_stride = p.q_rope_row_stride = 3 * 196 + 4;
      p.k_nope_head_stride = p.v_head_stride = 264;
      p.k_nope_row_stride = p.v_row_stride = 3 * 264 + 8;
      p.k_rope_row_stride = 72;
      p.out_head_stride = 132;
      p.out_row_stride = 3 * 132 + 4;
      batch.q = RandomTensor(p.num_rows * p.q_nope_row_stride, seed);
      batch.kv = RandomTensor(batch.cu_kv.back() * p.k_nope_row_stride, seed + 1);
      batch.k_rope = RandomTensor(batch.cu_kv.back() * p.k_rope_row_stride, seed + 2);
      batch.out.assign(p.num_rows * p.out_row_stride, kNan);
    }
    for (auto* values : {&batch.q, &batch.kv, &batch.k_rope}) {
      for (float& value : *values) {
        const uint32_t bits = uint32_t{Round(value)} << 16;
        std::memcpy(&value, &bits, sizeof(value));
      }
    }
    batch.params.softmax_scale = 0.0722f;
    batch.params.num_keys = batch.cu_kv.back();
    return batch;
  }
  RaggedMhaParams DeviceParams(const Batch& batch) {
    RaggedMhaParams params = batch.params;
    params.cu_seqlens_q = Upload(batch.cu_q);
    params.cu_seqlens_kv = Upload(batch.cu_kv);
    params.q_nope = Upload(batch.q);
    params.q_rope = params.q_nope + params.qk_nope_head_dim;
    params.kv_dtype = DType::kBfloat16;
    const uint16_t* kv = Upload(Round(batch.kv));
    params.k_nope = kv;
    params.v = kv + params.qk_nope_head_dim;
    params.k_rope = Upload(Round(batch.k_rope));
    params.out = Upload(batch.out);
    params.lse = Upload(batch.lse);
    return params;
  }
  static RaggedMhaParams HostParams(Batch& batch) {
    RaggedMhaParams params = batch.params;
    params.cu_seqlens_q = batch.cu_q.data();
    params.cu_seqlens_kv = batch.cu_kv.data();
    params.q_nope = batch.q.data();
    params.q_rope = params.q_nope + params.qk_nope_head_dim;
    params.k_nope = batch.kv.data();
    params.v = batch.kv.data() + params.qk_nope_head_dim;
    params.k_rope = batch.k_rope.data();
    params.out = batch.out.data();
    params.lse = batch.lse.data();
    return params;
  }
  // Attention weights are rounded to 8 bits, values are of unit size.
  void ExpectClose(const Batch& batch, const RaggedMhaParams& device) {
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out,
                         {.abs = 0x1p-7, .rel = 0x1p-7, .cosine = 5e-6}));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse,
                         {.abs = 1e-4, .rel = 1e-5, .cosine = 1e-10}));
  }
  // The same twice.
  void ExpectEqualsTheCpu(Batch& batch) {
    const RaggedMhaParams device = DeviceParams(batch);
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    ASSERT_TRUE(host_->attention().RaggedMha({}, HostParams(batch)).ok());
    ExpectClose(batch, device);  // NaN where nothing is written
    const std::vector<float> once = Download(device.out, batch.out.size());
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    EXPECT_TRUE(BitEqual(Download(device.out, batch.out.size()), once));
  }
};

TEST_F(CudaFlashMhaTest, EqualsTheCpu) {
  for (const bool dense : {true, false}) {
    SCOPED_TRACE(dense);
    // One token; prefixes; tile edges; without rows, keys, both; more rows than keys.
    Batch batch = MakeBatch({1, 5, 127, 128, 129, 0, 3, 0, 7, 300, 64, 65, 1},
                            {1, 70, 127, 128, 129, 9, 0, 0, 4, 511, 64, 193, 400}, 11, dense);
    ExpectEqualsTheCpu(batch);
  }
}

TEST_F(CudaFlashMhaTest, RoundedOutIsTheResultInBfloat16) {
  for (const bool dense : {true, false}) {
    SCOPED_TRACE(dense);
    Batch batch = MakeBatch({1, 127, 129, 0, 300, 65}, {70, 127, 200, 9, 300, 40}, 17, dense);
    if (dense) {  // lines of 16 bytes also in bf16
      batch.params.out_head_stride = 136;
      batch.params.out_row_stride = 3 * 136 + 8;
      batch.out.assign(batch.params.num_rows * batch.params.out_row_stride, kNan);
    }
    RaggedMhaParams device = DeviceParams(batch);
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    const std::vector<float> exact = Download(device.out, batch.out.size());
    device.out = nullptr;
    device.rounded_out = Upload(std::vector<uint16_t>(batch.out.size(), kUntouched));
    ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
    EXPECT_EQ(Download(device.rounded_out, batch.out.size()), RoundWritten(exact));
  }
}

TEST_F(CudaFlashMhaTest, BlocksTakeSeveralTilesEach) {
  // Of so many sequences that their tiles are sorted, and of more.
  for (const int32_t num_seqs : {60, 140}) {
    SCOPED_TRACE(num_seqs);
    std::vector<int32_t> q_lens, kv_lens;
    for (int32_t i = 0; i < num_seqs; ++i) {
      q_lens.push_back(i * 37 % 150);
      kv_lens.push_back(i % 7 == 0 ? q_lens.back() / 2 : q_lens.back() + i % 5 * 60);
    }
    Batch batch = MakeBatch(q_lens, kv_lens, 21);
    ExpectEqualsTheCpu(batch);
  }
}

TEST_F(CudaFlashMhaTest, HeadsWhoseKeysDoNotFitTheCacheTogether) {
  Batch batch = MakeBatch({5, 130}, {50000, 300}, 9);
  ExpectEqualsTheCpu(batch);
}

TEST_F(CudaFlashMhaTest, CausalOffsetsAndAccumulationEqualTheCpu) {
  Batch batch = MakeBatch({200, 60, 60, 60}, {400, 100, 100, 100}, 3);
  const std::vector<int32_t> offsets = {70, -30, 1000000, -100}, row_begin = {0, 200, 260, 320};
  RaggedMhaParams device = DeviceParams(batch), host = HostParams(batch);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  ASSERT_TRUE(host_->attention().RaggedMha({}, host).ok());
  device.accumulate = host.accumulate = true;
  host.causal_offset = offsets.data();
  host.q_row_begin = row_begin.data();
  device.causal_offset = Upload(offsets);
  device.q_row_begin = Upload(row_begin);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  ASSERT_TRUE(host_->attention().RaggedMha({}, host).ok());
  ExpectClose(batch, device);
}

TEST_F(CudaFlashMhaTest, NoOtherSequenceLeaksIn) {
  const std::vector<int32_t> lengths = {150, 90, 200};
  const Batch clean = MakeBatch(lengths, lengths, 5);
  const RaggedMhaParams clean_params = DeviceParams(clean);
  ASSERT_TRUE(device_->attention().RaggedMha({}, clean_params).ok());
  const std::vector<float> expected = Download(clean_params.out, clean.out.size());
  Batch poisoned = MakeBatch(lengths, lengths, 5);
  const RaggedMhaParams& p = poisoned.params;
  for (const auto& [begin, end] : {std::pair{0, 150}, {240, 440}}) {
    std::fill(poisoned.kv.begin() + begin * p.k_nope_row_stride,
              poisoned.kv.begin() + end * p.k_nope_row_stride, kNan);
    std::fill(poisoned.q.begin() + begin * p.q_nope_row_stride,
              poisoned.q.begin() + end * p.q_nope_row_stride, kNan);
  }
  const RaggedMhaParams device = DeviceParams(poisoned);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  const auto rows = [&](const std::vector<float>& out) {
    return absl::MakeConstSpan(out).subspan(150 * p.out_row_stride, 90 * p.out_row_stride);
  };
  EXPECT_TRUE(BitEqual(rows(Download(device.out, poisoned.out.size())), rows(expected)));
}

TEST_F(CudaFlashMhaTest, LargeScoresDoNotOverflow) {
  Batch batch = MakeBatch({140}, {140}, 77);
  for (float& value : batch.q) value *= 8192;
  const RaggedMhaParams device = DeviceParams(batch);
  ASSERT_TRUE(device_->attention().RaggedMha({}, device).ok());
  const std::vector<float> out = Download(device.out, batch.out.size());
  for (int64_t row = 0; row < 140; ++row) {
    for (int64_t d = 0; d < 128; ++d) {
      EXPECT_TRUE(std::isfinite(out[row * batch.params.out_row_stride + d]));
    }
  }
}

}  // namespace
}  // namespace kernels

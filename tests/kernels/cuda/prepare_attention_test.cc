// PrepareAttention: what a step's rows need before attention, of which some are absorbed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/linear.h"
#include "kernels/store_kv.h"
#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;

constexpr int32_t kHeads = 3, kNope = 128, kRope = 64, kValue = 32, kRank = 256;
constexpr int32_t kBlockSize = 16, kMaxPositions = 100;
constexpr int64_t kHeadValues = kNope + kRope, kQueryStride = kHeads * kHeadValues + 4;

class CudaPrepareAttentionTest : public DeviceTest {
 protected:
  CudaPrepareAttentionTest() : DeviceTest(/*bfloat16=*/true) {}

  struct Step {
    std::vector<float> queries;  // [rows, kQueryStride]
    std::vector<std::byte> pages;
    std::vector<float> absorbed;  // [absorbed rows, kHeads, kRank]
  };

  // Of `num_rows` rows the first `num_absorbed` are absorbed.
  void Make(int32_t num_rows, int32_t num_absorbed) {
    num_rows_ = num_rows;
    num_absorbed_ = num_absorbed;
    kv_a_ = RandomTensor(num_rows * (kRank + kRope), 1);
    norm_ = RandomTensor(kRank, 2);
    for (const float angle : RandomTensor(kMaxPositions * kRope / 2, 3)) {
      cos_.push_back(std::cos(angle));
      sin_.push_back(std::sin(angle));
    }
    for (int32_t row = 0; row < num_rows; ++row) {
      positions_.push_back(row * 7 % kMaxPositions);
      slots_.push_back(row % 13 == 4 ? -1 : num_rows - 1 - row);
    }
    pages_ = {.block_stride = kBlockSize * (kRank + kRope) * 2,
              .block_size = kBlockSize,
              .entry_bytes = (kRank + kRope) * 2,
              .format = KvFormat::kBfloat16};
    before_.queries = RandomTensor(num_rows * kQueryStride, 4);
    before_.pages.assign((num_rows / kBlockSize + 1) * pages_.block_stride, std::byte{0xff});
    before_.absorbed.assign(num_absorbed * kHeads * kRank, kNan);
    weight_ = MakeWeight({"", DType::kBfloat16}, kHeads * (kNope + kValue), kRank, 5);
  }

  PrepareAttentionParams Params(const PackedHeadLinear* weight, Step& at) const {
    PrepareAttentionParams params;
    params.rope = {.num_rows = num_rows_,
                   .num_heads = kHeads,
                   .data = at.queries.data() + kNope,
                   .row_stride = kQueryStride,
                   .head_stride = kHeadValues,
                   .rope = {cos_.data(), sin_.data(), kRope, kMaxPositions},
                   .positions = positions_.data()};
    params.store.num_rows = num_rows_;
    params.store.kv_a = kv_a_.data();
    params.store.kv_a_row_stride = kRank + kRope;
    params.store.kv_lora_rank = kRank;
    params.store.norm_weight = norm_.data();
    params.store.rope = params.rope.rope;
    params.store.positions = positions_.data();
    params.store.slots = slots_.data();
    params.store.pages = pages_;
    params.store.pages.base = at.pages.data();
    params.absorb = {.weight = weight,
                     .num_rows = num_absorbed_,
                     .input = at.queries.data(),
                     .input_row_stride = kQueryStride,
                     .input_head_stride = kHeadValues,
                     .output = at.absorbed.data(),
                     .output_row_stride = kHeads * kRank,
                     .output_head_stride = kRank};
    return params;
  }

  Step RunOnHost() {
    Step step = before_;
    const auto weight = host_->PackHeadLinear(weight_.tensor, kSlice);
    EXPECT_TRUE(host_->PrepareAttention({}, Params(weight->get(), step)).ok());
    return step;
  }
  // At once, or by the three operations that it stands for.
  Step RunOnDevice(bool at_once) {
    Step step = before_;
    const auto weight = device_->PackHeadLinear(weight_.tensor, kSlice);
    PrepareAttentionParams params = Params(weight->get(), step);
    float* queries = Upload(step.queries);
    params.rope.data = queries + kNope;
    params.rope.rope.cos = Upload(cos_);
    params.rope.rope.sin = Upload(sin_);
    params.rope.positions = Upload(positions_);
    params.store.kv_a = Upload(kv_a_);
    params.store.norm_weight = Upload(norm_);
    params.store.rope = params.rope.rope;
    params.store.positions = params.rope.positions;
    params.store.slots = Upload(slots_);
    params.store.pages.base = UploadBytes(step.pages);
    params.absorb.input = queries;
    if (num_absorbed_ > 0) params.absorb.output = Upload(step.absorbed);
    if (at_once) {
      EXPECT_TRUE(device_->PrepareAttention({}, params).ok());
    } else {
      EXPECT_TRUE(device_->Rope({}, params.rope).ok());
      EXPECT_TRUE(device_->StoreKv({}, params.store).ok());
      EXPECT_TRUE(num_absorbed_ == 0 || device_->HeadLinear({}, params.absorb).ok());
    }
    step.queries = Download(queries, step.queries.size());
    step.pages = Download(params.store.pages.base, step.pages.size());
    if (num_absorbed_ > 0) {
      step.absorbed = Download(params.absorb.output, step.absorbed.size());
    }
    return step;
  }

 private:
  static constexpr HeadSlice kSlice{kHeads, kNope + kValue, 0, kNope, /*transpose=*/true};

  int32_t num_rows_ = 0, num_absorbed_ = 0;
  std::vector<float> kv_a_, norm_, cos_, sin_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  KvPages pages_;
  Step before_;
  TestWeight weight_;
};

struct Rows {
  int32_t all;
  int32_t absorbed;
};

class CudaPreparedRowsTest : public CudaPrepareAttentionTest,
                             public ::testing::WithParamInterface<Rows> {};

TEST_P(CudaPreparedRowsTest, AreThoseOfTheCpuAndOfTheThreeOperations) {
  Make(GetParam().all, GetParam().absorbed);
  const Step actual = RunOnDevice(/*at_once=*/true), expected = RunOnHost();
  EXPECT_TRUE(BitEqual(actual.queries, expected.queries));
  EXPECT_TRUE(actual.pages == expected.pages);
  float largest = 0;
  for (const float value : expected.absorbed) largest = std::max(largest, std::abs(value));
  EXPECT_TRUE(AllClose(actual.absorbed, expected.absorbed,
                       {.abs = 0x1p-8 * largest, .cosine = 1e-5}));  // queries are rounded to bf16
  const Step apart = RunOnDevice(/*at_once=*/false);
  EXPECT_TRUE(BitEqual(actual.queries, apart.queries));
  EXPECT_TRUE(actual.pages == apart.pages);
  EXPECT_TRUE(BitEqual(actual.absorbed, apart.absorbed));
}

// Decode steps, a prompt's alone, and mixed ones: with more than 512 rows the absorbed ones have a
// kernel of their own.
INSTANTIATE_TEST_SUITE_P(Steps, CudaPreparedRowsTest,
                         ::testing::Values(Rows{1, 1}, Rows{5, 5}, Rows{100, 100}, Rows{30, 0},
                                           Rows{700, 0}, Rows{64, 3}, Rows{512, 20}, Rows{513, 1},
                                           Rows{700, 3}, Rows{700, 40}));

}  // namespace
}  // namespace kernels

#include "kernels/hyper_connection.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

// Chains of tens of float operations on values of about 1.
constexpr numerics::Tolerance kTolerance = {.abs = 2e-5, .rel = 2e-5};

class CudaHyperConnectionTest : public DeviceTest {
 protected:
  // Both calls on both backends, `mix_back` false: a collapse alone.
  void Check(int32_t rows, int32_t n, int64_t hidden, int32_t iterations, bool mix_back) {
    const int64_t mixes = mix_back ? n * (2 + n) : n;
    // Mixes of about 5, whatever the depth.
    const float scale_of_fn = 5 / std::sqrt(static_cast<float>(n * hidden));
    const std::vector<float> fn = RandomTensor(mixes * n * hidden, 1, scale_of_fn);
    const std::vector<float> base = RandomTensor(mixes, 2);
    const std::vector<float> scale = {0.7f, 1.3f, 0.4f};
    const std::vector<float> y = RandomTensor(rows * hidden, 4);
    std::vector<float> streams = RandomTensor(rows * n * hidden, 3);
    const WeightTensor tensor{
        .data = fn.data(), .dtype = DType::kFloat32, .rows = mixes, .cols = n * hidden};
    const auto here = host_->PackLinear({&tensor, 1}), there = device_->PackLinear({&tensor, 1});
    ASSERT_TRUE(here.ok() && there.ok());
    std::vector<float> scratch(rows * mixes), output(rows * hidden, kNan), post(rows * n, kNan),
        comb(rows * n * n, kNan);
    HyperPreParams pre{.num_rows = rows,
                       .num_streams = n,
                       .hidden_size = hidden,
                       .streams = Upload(streams),
                       .fn = there->get(),
                       .base = Upload(base),
                       .scale = Upload(scale),
                       .norm_eps = 1e-3f,
                       .eps = 1e-4f,
                       .sinkhorn_iters = iterations,
                       .mixes = Upload(scratch),
                       .output = Upload(output),
                       .post = mix_back ? Upload(post) : nullptr,
                       .comb = mix_back ? Upload(comb) : nullptr};
    HyperPostParams back{.num_rows = rows,
                         .num_streams = n,
                         .hidden_size = hidden,
                         .block_output = Upload(y),
                         .post = pre.post,
                         .comb = pre.comb,
                         .streams = const_cast<float*>(pre.streams)};
    const HyperPreParams device_pre = pre;
    const HyperPostParams device_back = back;
    absl::Status status = device_->HyperPre({}, device_pre);
    ASSERT_TRUE(status.ok()) << status;
    if (mix_back) {
      ASSERT_TRUE(device_->HyperPost({}, device_back).ok());
    }
    pre.streams = streams.data();
    pre.fn = here->get();
    pre.base = base.data();
    pre.scale = scale.data();
    pre.mixes = scratch.data();
    pre.output = output.data();
    pre.post = back.post == nullptr ? nullptr : post.data();
    pre.comb = back.comb == nullptr ? nullptr : comb.data();
    ASSERT_TRUE(host_->HyperPre({}, pre).ok());
    EXPECT_TRUE(
        numerics::AllClose<float>(Download(device_pre.output, output.size()), output, kTolerance));
    if (!mix_back) return;
    back.block_output = y.data();
    back.post = post.data();
    back.comb = comb.data();
    back.streams = streams.data();
    ASSERT_TRUE(host_->HyperPost({}, back).ok());
    EXPECT_TRUE(
        numerics::AllClose<float>(Download(device_pre.post, post.size()), post, kTolerance));
    EXPECT_TRUE(
        numerics::AllClose<float>(Download(device_pre.comb, comb.size()), comb, kTolerance));
    EXPECT_TRUE(numerics::AllClose<float>(Download(device_back.streams, streams.size()), streams,
                                          kTolerance));
  }
};

TEST_F(CudaHyperConnectionTest, EqualsTheCpu) {
  Check(9, 4, 64, 20, true);
  Check(1, 4, 512, 20, true);
  Check(1, 4, 96, 1, true);
  Check(3, 1, 7, 2, true);
  Check(40, 3, 33, 5, true);
  Check(2, kMaxStreams, 5, 3, true);
  Check(5, 4, 64, 20, false);
  // One, two, four and eight rows a cluster of blocks.
  Check(16, 4, 4096, 20, true);
  Check(31, 4, 64, 20, true);
  Check(61, 4, 96, 20, true);
  Check(135, 4, 128, 20, true);
  Check(135, 4, 128, 20, false);
}

TEST_F(CudaHyperConnectionTest, ARowsBitsDependOnItAlone) {
  constexpr int32_t kRows = 70, kMixes = 24;
  constexpr int64_t kHidden = 256;
  const std::vector<float> fn = RandomTensor(kMixes * 4 * kHidden, 1, 0.3f);
  const WeightTensor tensor{
      .data = fn.data(), .dtype = DType::kFloat32, .rows = kMixes, .cols = 4 * kHidden};
  const auto packed = device_->PackLinear({&tensor, 1});
  ASSERT_TRUE(packed.ok());
  const auto floats = [&](int64_t count) { return Upload(std::vector<float>(count, kNan)); };
  HyperPreParams together{.num_rows = kRows,
                          .num_streams = 4,
                          .hidden_size = kHidden,
                          .streams = Upload(RandomTensor(kRows * 4 * kHidden, 3)),
                          .fn = packed->get(),
                          .base = Upload(RandomTensor(kMixes, 2)),
                          .scale = Upload(std::vector<float>{0.7f, 1.3f, 0.4f}),
                          .mixes = floats(kRows * kMixes),
                          .output = floats(kRows * kHidden),
                          .post = floats(kRows * 4),
                          .comb = floats(kRows * 16)};
  ASSERT_TRUE(device_->HyperPre({}, together).ok());
  HyperPreParams alone = together;
  alone.num_rows = 1;
  alone.output = floats(kRows * kHidden);
  alone.post = floats(kRows * 4);
  alone.comb = floats(kRows * 16);
  const HyperPreParams first = alone;
  for (int32_t row = 0; row < kRows; ++row) {
    ASSERT_TRUE(device_->HyperPre({}, alone).ok());
    alone.streams += 4 * kHidden;
    alone.output += kHidden;
    alone.post += 4;
    alone.comb += 16;
  }
  EXPECT_TRUE(numerics::BitEqual(Download(first.output, kRows * kHidden),
                                 Download(together.output, kRows * kHidden)));
  EXPECT_TRUE(
      numerics::BitEqual(Download(first.post, kRows * 4), Download(together.post, kRows * 4)));
  EXPECT_TRUE(
      numerics::BitEqual(Download(first.comb, kRows * 16), Download(together.comb, kRows * 16)));
}

TEST_F(CudaHyperConnectionTest, RefusesWhatCannotBe) {
  EXPECT_THAT(
      device_->HyperPost({}, {.num_rows = 1, .num_streams = 17, .hidden_size = 4}).ToString(),
      HasSubstr("17 streams"));
  EXPECT_THAT(
      device_->HyperPost({}, {.num_rows = 1, .num_streams = 4, .hidden_size = 4}).ToString(),
      HasSubstr("null"));
}

}  // namespace
}  // namespace kernels

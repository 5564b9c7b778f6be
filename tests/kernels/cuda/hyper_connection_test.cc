#include "kernels/hyper_connection.h"

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
    const std::vector<float> fn = RandomTensor(mixes * n * hidden, 1, 0.3f);
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

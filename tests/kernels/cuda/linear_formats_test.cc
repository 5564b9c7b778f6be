// Stacks and heads in formats that the products of bf16 have no form for.

#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

class CudaLinearFormatsTest : public DeviceTest {
 protected:
  CudaLinearFormatsTest() : DeviceTest(/*bfloat16=*/true) {}

  // Rounded rows and weights: half a unit of the 8th bit of either factor, as in linear_test.cc.
  static numerics::Tolerance Rounding(int64_t k) {
    return {.abs = 0x1p-9 * 6 * static_cast<double>(k), .cosine = 1e-5};
  }
};

// V3.2's q_a, kv_a, the indexer's key and its weights of heads: fp8 and bf16 in one stack.
TEST_F(CudaLinearFormatsTest, AStackOfSeveralFormatsEqualsTheCpu) {
  constexpr int64_t kK = 512;
  const TestWeight parts[] = {MakeWeight({"", DType::kFloat8E4m3, 128, 128}, 256, kK, 1),
                              MakeWeight({"", DType::kFloat8E4m3, 128, 128}, 72, kK, 2),
                              MakeWeight({"", DType::kBfloat16}, 40, kK, 3)};
  const std::vector<WeightTensor> stack = {parts[0].tensor, parts[1].tensor, parts[2].tensor};
  // Segments that end where a matrix does, and others.
  const std::vector<std::vector<int64_t>> cuts = {{256, 72, 40}, {100, 156, 72, 40}, {200, 168}};
  for (const int32_t rows : {1, 16, 40}) {
    for (const std::vector<int64_t>& columns : cuts) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << columns.size() << " segments");
      std::vector<float> input = RandomFloats(rows * kK, 4), norm = RandomFloats(kK, 5);
      std::vector<float> out(rows * 368, kNan);
      const auto run = [&](Backend& backend, float* in, float* norm_weight, float* to,
                           std::byte* workspace) {
        const auto packed = backend.PackLinear(stack);
        ASSERT_TRUE(packed.ok()) << packed.status();
        std::vector<OutputSegment> segments;
        int64_t begin = 0;
        for (const int64_t count : columns) {
          segments.push_back({to + begin, 368, count});
          begin += count;
        }
        const absl::Status status = backend.Linear({}, {.weight = packed->get(),
                                                        .num_rows = rows,
                                                        .input = {.data = in, .row_stride = kK},
                                                        .norm_weight = norm_weight,
                                                        .norm_eps = 1e-3f,
                                                        .outputs = segments,
                                                        .workspace = workspace});
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_TRUE(backend.Synchronize({}).ok());
      };
      float* device_out = Upload(out);
      run(*device_, Upload(input), Upload(norm), device_out,
          Workspace(device_->LinearWorkspaceBytes(rows, kK)));
      run(*host_, input.data(), norm.data(), out.data(), nullptr);
      EXPECT_TRUE(numerics::AllClose(Download(device_out, out.size()), out, Rounding(kK)));
    }
  }
}

TEST_F(CudaLinearFormatsTest, Float8HeadsEqualTheCpu) {
  constexpr int64_t kHeads = 3, kHeadRows = 96, kCols = 160;
  for (const DType scales : {DType::kFloat32, DType::kFloat8E8m0}) {
    const TestWeight weight =
        MakeWeight({"", DType::kFloat8E4m3, 128, 128, scales}, kHeads * kHeadRows, kCols, 1);
    for (const int32_t rows : {1, 9, 35}) {
      for (const bool transpose : {false, true}) {
        SCOPED_TRACE(testing::Message() << rows << (transpose ? " transposed" : ""));
        const HeadSlice slice{kHeads, kHeadRows, 32, 64, transpose};
        const int64_t n = transpose ? kCols : 64, k = transpose ? 64 : kCols;
        const std::vector<float> input = RandomFloats(rows * kHeads * k, 2);
        std::vector<float> out(rows * kHeads * n, kNan);
        const auto run = [&](Backend& backend, const float* in, float* to) {
          const auto packed = backend.PackHeadLinear(weight.tensor, slice);
          ASSERT_TRUE(packed.ok()) << packed.status();
          const absl::Status status = backend.HeadLinear({}, {.weight = packed->get(),
                                                              .num_rows = rows,
                                                              .input = in,
                                                              .input_row_stride = kHeads * k,
                                                              .input_head_stride = k,
                                                              .output = to,
                                                              .output_row_stride = kHeads * n,
                                                              .output_head_stride = n});
          EXPECT_TRUE(status.ok()) << status;
          EXPECT_TRUE(backend.Synchronize({}).ok());
        };
        float* device_out = Upload(out);
        run(*device_, Upload(input), device_out);
        run(*host_, input.data(), out.data());
        EXPECT_TRUE(numerics::AllClose(Download(device_out, out.size()), out, Rounding(k)));
      }
    }
  }
}

}  // namespace
}  // namespace kernels

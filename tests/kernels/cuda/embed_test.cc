#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

class CudaEmbedTest : public DeviceTest {};

TEST_F(CudaEmbedTest, EqualsTheCpuBitForBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    const TestWeight table = MakeWeight({"", dtype}, 10, 300, 1);
    const std::vector<int32_t> ids = {3, -1, 9, 10, 5}, source = {-1, -1, -1, -1, 1};
    const std::vector<int32_t> sampled = {0, 6};
    std::vector<float> expected(6 * 301, 1234.5f);
    EmbedParams params = {.num_rows = 5,
                          .token_ids = ids.data(),
                          .token_source = source.data(),
                          .previous_sampled = sampled.data(),
                          .table = table.tensor,
                          .output = expected.data(),
                          .output_row_stride = 301};
    float* out = Upload(expected);
    std::vector<int32_t> resolved(5, -7);
    int32_t* device_resolved = Upload(resolved);
    params.resolved_ids = resolved.data();
    ASSERT_TRUE(host_->Embed({}, params).ok());
    params.token_ids = Upload(ids);
    params.token_source = Upload(source);
    params.previous_sampled = Upload(sampled);
    params.table.data = Upload(table.bytes);
    params.output = out;
    params.resolved_ids = device_resolved;
    ASSERT_TRUE(device_->Embed({}, params).ok());
    EXPECT_TRUE(numerics::BitEqual(Download(out, expected.size()), expected));
    EXPECT_EQ(Download(device_resolved, 5), resolved);
  }
}

}  // namespace
}  // namespace kernels

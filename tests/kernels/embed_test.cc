#include "kernels/cpu/embed.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TEST(EmbedTest, LooksUpHostIdsAndSampledIds) {
  ThreadPool pool(2);
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    const TestWeight table = MakeWeight({"", dtype}, 10, 7, 1);
    const std::vector<int32_t> ids = {3, -1, 9, 10, 5}, source = {-1, -1, -1, -1, 1};
    const std::vector<int32_t> sampled = {0, 6};
    std::vector<float> out(6 * 8, 1234.5f);
    std::vector<int32_t> resolved(6, 77);
    ASSERT_TRUE(Embed(pool, {.num_rows = 5,
                             .token_ids = ids.data(),
                             .token_source = source.data(),
                             .previous_sampled = sampled.data(),
                             .table = table.tensor,
                             .output = out.data(),
                             .output_row_stride = 8,
                             .resolved_ids = resolved.data()})
                    .ok());
    EXPECT_THAT(resolved, ::testing::ElementsAre(3, -1, 9, 10, 6, 77));
    // Row 4 takes what was sampled; ids outside the table give zeros; nothing else is written.
    const int64_t rows[] = {3, -1, 9, -1, 6};
    for (int64_t r = 0; r < 6; ++r) {
      for (int64_t c = 0; c < 8; ++c) {
        const double expected = r == 5 || c == 7 ? 1234.5 : rows[r] < 0 ? 0 : table.at(rows[r], c);
        EXPECT_EQ(out[static_cast<size_t>(r * 8 + c)], expected) << r << " " << c;
      }
    }
  }
}

TEST(EmbedTest, RefusesTablesItCannotRead) {
  ThreadPool pool(1);
  const TestWeight table = MakeWeight({"", DType::kFloat8E4m3, 128, 128}, 4, 4, 1);
  const int32_t id = 0;
  std::vector<float> out(4, 1.0f);
  EmbedParams params = {
      .num_rows = 1, .token_ids = &id, .table = table.tensor, .output = out.data()};
  EXPECT_THAT(std::string(Embed(pool, params).message()), HasSubstr("dtype float8"));
  params.table.dtype = DType::kBfloat16;
  EXPECT_THAT(std::string(Embed(pool, params).message()), HasSubstr("scales"));
  EXPECT_THAT(out, Each(1.0f));
}

}  // namespace
}  // namespace kernels::cpu

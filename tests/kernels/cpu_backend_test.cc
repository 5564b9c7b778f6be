#include "kernels/cpu/cpu_backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/test_weights.h"

namespace kernels::cpu {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CpuBackendTest, BuffersAreZeroedAndAligned) {
  const std::unique_ptr<Backend> backend = CreateCpuBackend(2);
  EXPECT_EQ(backend->name(), "cpu");
  for (const int64_t size : {0, 1, 63, 64, 1000}) {
    const auto buffer = backend->Allocate(size);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ((*buffer)->size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 64, 0u);
    EXPECT_THAT(std::vector<std::byte>((*buffer)->data(), (*buffer)->data() + size),
                Each(std::byte{0}));
  }
  EXPECT_EQ(backend->Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they abort on such a size
  EXPECT_EQ(backend->Allocate(int64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
#endif
}

TEST(CpuBackendTest, CopiesGoBothWays) {
  const std::unique_ptr<Backend> backend = CreateCpuBackend(1);
  const auto buffer = backend->Allocate(4);
  ASSERT_TRUE(buffer.ok());
  const std::byte in[] = {std::byte{1}, std::byte{2}, std::byte{3}};
  ASSERT_TRUE(backend->CopyToDevice({}, (*buffer)->data(), in).ok());
  std::byte out[2] = {};
  ASSERT_TRUE(backend->CopyToHost({}, absl::MakeSpan(out), (*buffer)->data() + 1).ok());
  EXPECT_THAT(out, ElementsAre(std::byte{2}, std::byte{3}));
}

TEST(CpuBackendTest, CopyBlocksCopiesWholeBlocksInOrder) {
  const std::unique_ptr<Backend> backend = CreateCpuBackend(1);
  std::vector<std::byte> cache;
  for (int block = 0; block < 5; ++block)
    cache.insert(cache.end(), 3, static_cast<std::byte>(block));
  // 1 -> 3, then what is in 3 -> 4; negative ids are skipped.
  ASSERT_TRUE(backend->CopyBlocks({}, cache.data(), 3, {1, 3, -1, 2}, {3, 4, 0, -1}).ok());
  std::vector<int> first_bytes;
  for (size_t i = 0; i < cache.size(); ++i) {
    EXPECT_EQ(cache[i], cache[i / 3 * 3]);
    if (i % 3 == 0) first_bytes.push_back(std::to_integer<int>(cache[i]));
  }
  EXPECT_THAT(first_bytes, ElementsAre(0, 1, 2, 1, 1));
  EXPECT_THAT(std::string(backend->CopyBlocks({}, cache.data(), 3, {1, 2}, {3}).message()),
              HasSubstr("2 blocks to 1"));
}

// Each operation behind the interface reaches its implementation with its arguments.
TEST(CpuBackendTest, MatrixOperationsAreWired) {
  const std::unique_ptr<Backend> backend = CreateCpuBackend(2);
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, 4, 4, 1);
  const auto linear = backend->PackLinear({weight.tensor});
  ASSERT_TRUE(linear.ok());
  float in[4] = {1, 0, 0, 0}, out[4] = {};
  const OutputSegment segment = {out, 4, 4};
  ASSERT_TRUE(backend
                  ->Linear({}, {.weight = linear->get(),
                                .num_rows = 1,
                                .input = {.data = in, .row_stride = 4},
                                .outputs = {&segment, 1}})
                  .ok());
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(out[i], weight.at(i, 0));
  const auto heads = backend->PackHeadLinear(weight.tensor, {2, 2, 0, 2, false});
  ASSERT_TRUE(heads.ok());
  float head_in[8] = {0, 1, 0, 0, 0, 0, 1, 0};
  ASSERT_TRUE(backend
                  ->HeadLinear({}, {.weight = heads->get(),
                                    .num_rows = 1,
                                    .input = head_in,
                                    .input_row_stride = 8,
                                    .input_head_stride = 4,
                                    .output = out,
                                    .output_row_stride = 4,
                                    .output_head_stride = 2})
                  .ok());
  EXPECT_EQ(out[0], weight.at(0, 1));
  EXPECT_EQ(out[3], weight.at(3, 2));
  const ExpertTensors expert = {weight.tensor, weight.tensor, weight.tensor};
  const auto experts = backend->PackExperts({expert}, {});
  ASSERT_TRUE(experts.ok());
  const TestWeight gate = MakeWeight({"", DType::kBfloat16}, 1, 4, 1);
  const auto packed_gate = backend->PackLinear({gate.tensor});
  MoeParams moe = {.num_rows = 1,
                   .input = in,
                   .input_row_stride = 4,
                   .norm_weight = in,
                   .gate = {.num_experts = 1, .top_k = 1},
                   .gate_weight = packed_gate->get(),
                   .experts = experts->get(),
                   .output = out,
                   .output_row_stride = 4};
  int32_t id = -1;
  moe.topk_ids = &id;
  ASSERT_TRUE(backend->Moe({}, moe).ok());
  EXPECT_EQ(id, 0);
  const int32_t token = 2;
  ASSERT_TRUE(
      backend
          ->Embed({}, {.num_rows = 1, .token_ids = &token, .table = weight.tensor, .output = out})
          .ok());
  EXPECT_EQ(out[1], weight.at(2, 1));
}

}  // namespace
}  // namespace kernels::cpu

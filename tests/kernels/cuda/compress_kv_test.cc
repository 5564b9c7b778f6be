#include "kernels/compress_kv.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/compressor.h"
#include "tests/kernels/cuda/device_test.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

class CudaCompressKvTest : public DeviceTest,
                           public ::testing::WithParamInterface<CompressorShape> {
 protected:
  // The operation on the device, over copies of what the parameters point to; the cache and the
  // state come back.
  absl::Status Run(Compressor& compressor, const std::vector<Compressor::Chunk>& chunks,
                   const std::vector<Compressor::Tokens>& kv,
                   const std::vector<Compressor::Tokens>& gate) {
    return compressor.Compress(
        [&](CompressKvParams params) {
          const auto copy = [&](const auto* from, int64_t count) {
            return Upload(std::vector(from, from + count));
          };
          const CompressKvParams host = params;
          const int64_t cache_bytes = static_cast<int64_t>(compressor.cache().size());
          const int64_t state_bytes = Compressor::kSlots * params.state_stride;
          params.cu_seqlens_q = copy(host.cu_seqlens_q, host.num_seqs + 1);
          params.kv_len = copy(host.kv_len, host.num_seqs);
          params.block_table = copy(host.block_table, host.num_seqs * host.block_table_stride);
          params.kv = copy(host.kv, host.num_rows * host.kv_row_stride);
          params.gate = copy(host.gate, host.num_rows * host.gate_row_stride);
          params.position_bias = copy(host.position_bias, host.ratio * host.kv_row_stride);
          params.norm_weight = copy(host.norm_weight, host.dim);
          params.rope.cos = copy(host.rope.cos, kMaxPositions * host.rope.rope_dim / 2);
          params.rope.sin = copy(host.rope.sin, kMaxPositions * host.rope.rope_dim / 2);
          params.state_slots = copy(host.state_slots, host.num_seqs);
          params.pages.base = copy(host.pages.base, cache_bytes);
          params.state = copy(host.state, state_bytes);
          const absl::Status status = device_->CompressKv({}, params);
          if (!status.ok()) return status;
          const auto bring = [&](std::byte* to, const std::byte* from, int64_t count) {
            const std::vector<std::byte> bytes = Download(from, static_cast<size_t>(count));
            std::copy(bytes.begin(), bytes.end(), to);
          };
          bring(host.pages.base, params.pages.base, cache_bytes);
          bring(host.state, params.state, state_bytes);
          return status;
        },
        chunks, kv, gate);
  }
};

TEST_P(CudaCompressKvTest, EntriesEqualTheDoubleReference) {
  const CompressorShape& shape = GetParam();
  Compressor compressor(shape, 1);
  const int32_t length = 5 * shape.ratio + (shape.ratio > 1 ? shape.ratio / 2 : 0);
  const auto kv = compressor.RandomTokens(length, 2), gate = compressor.RandomTokens(length, 3);
  const absl::Status status = Run(compressor, {{0, 0, length, 2}}, {kv}, {gate});
  ASSERT_TRUE(status.ok()) << status;
  // A few float operations on values of about 1, then half a step of the format.
  const double rel = shape.format == KvFormat::kFloat32    ? 0
                     : shape.format == KvFormat::kBfloat16 ? 0x1p-8
                                                           : 0x1p-4;
  const double abs = shape.format == KvFormat::kFloat32 ? 1e-5 : 1e-3;
  EXPECT_TRUE(numerics::AllClose<double>(compressor.Entries(0, 5),
                                         compressor.Reference(kv, gate, 5),
                                         {.abs = abs, .rel = 1.01 * rel}));
}

// Where the rows of a sequence are cut changes no byte, neither of entries nor of the state.
TEST_P(CudaCompressKvTest, ChunksAndDecodesLeaveTheSameBytes) {
  const CompressorShape& shape = GetParam();
  constexpr int32_t kLength = 133;
  Compressor whole(shape, 1);
  const auto kv = whole.RandomTokens(kLength, 2), gate = whole.RandomTokens(kLength, 3);
  ASSERT_TRUE(Run(whole, {{0, 0, kLength, 1}}, {kv}, {gate}).ok());
  for (const int32_t chunk : {1, 4, 5, 31, 32, 129}) {
    Compressor cut(shape, 1);
    for (int32_t begin = 0; begin < kLength; begin += chunk) {
      ASSERT_TRUE(Run(cut, {{0, begin, std::min(begin + chunk, kLength), 1}}, {kv}, {gate}).ok());
    }
    EXPECT_TRUE(cut.cache() == whole.cache()) << "chunks of " << chunk;
    EXPECT_TRUE(numerics::BitEqual(cut.StateOf(1), whole.StateOf(1))) << "chunks of " << chunk;
  }
}

// Three sequences in all phases of their windows, in one call and one by one.
TEST_P(CudaCompressKvTest, ABatchLeavesTheBytesOfEachAlone) {
  const CompressorShape& shape = GetParam();
  Compressor together(shape, 1), alone(shape, 1);
  std::vector<Compressor::Tokens> kv, gate;
  for (uint32_t seq = 0; seq < 3; ++seq) {
    kv.push_back(together.RandomTokens(120, 10 + seq));
    gate.push_back(together.RandomTokens(120, 20 + seq));
  }
  const std::vector<std::vector<Compressor::Chunk>> steps = {
      {{0, 0, 37, 3}, {2, 0, 50, -1}, {1, 0, 1, 5}},
      {{1, 1, 2, 5}, {2, 0, 64, 0}, {0, 37, 38, 3}},
      {{0, 38, 120, 3}, {2, 64, 65, 0}, {1, 2, 100, 5}}};
  for (const auto& step : steps) {
    ASSERT_TRUE(Run(together, step, kv, gate).ok());
    for (const Compressor::Chunk& chunk : step) {
      ASSERT_TRUE(Run(alone, {chunk}, kv, gate).ok());
    }
  }
  EXPECT_TRUE(together.cache() == alone.cache());
  for (const int32_t slot : {0, 3, 5}) {
    EXPECT_TRUE(numerics::BitEqual(together.StateOf(slot), alone.StateOf(slot)));
  }
  EXPECT_TRUE(std::isnan(together.StateOf(2)[0]));  // of nobody
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaCompressKvTest, ::testing::ValuesIn(CompressorShapes()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kernels

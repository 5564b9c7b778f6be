#include "kernels/absorbed_decode.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/store_kv.h"
#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

// Scores reach about 15: float32 rounding of sums of 576 products is what differs.
constexpr numerics::Tolerance kTolerance{.abs = 1e-5, .rel = 4e-5, .cosine = 1e-10};
constexpr int32_t kUnusedBlock = 0x7fffff00;  // past a sequence's end the table may hold anything

struct Dims {
  int32_t heads, rank, rope;
};

// What strides are multiples of; there is room between rows all the same.
struct Alignment {
  int32_t entry_bytes = 4;
  int32_t query_elements = 1;
};
int32_t PastWith(int32_t size, int32_t alignment) { return (size / alignment + 1) * alignment; }

// A batch over a paged cache of twice the blocks it needs, in host memory.  What is nobody's is
// NaN.
struct Batch {
  Batch(const Dims& dims, KvFormat format, int32_t block_size, const std::vector<int32_t>& q_lens,
        std::vector<int32_t> lens, int32_t split_tokens, uint32_t seed, const Alignment& alignment)
      : cu_q{0}, kv_lens(std::move(lens)) {
    for (const int32_t n : q_lens) cu_q.push_back(cu_q.back() + n);
    params.num_seqs = static_cast<int32_t>(q_lens.size());
    params.num_rows = cu_q.back();
    params.max_q_len = *std::max_element(q_lens.begin(), q_lens.end());
    params.num_heads = dims.heads;
    params.kv_lora_rank = dims.rank;
    params.qk_rope_head_dim = dims.rope;
    params.softmax_scale = 0.1f;
    const int32_t head_stride = PastWith(dims.rank + dims.rope, alignment.query_elements);
    params.q_latent_head_stride = params.q_rope_head_stride = head_stride;
    params.q_latent_row_stride = params.q_rope_row_stride =
        PastWith(dims.heads * head_stride + 1, alignment.query_elements);
    params.out_head_stride = dims.rank + 3;
    params.out_row_stride = dims.heads * params.out_head_stride + 1;
    params.lse_stride = params.num_rows + 4;
    q = RandomTensor(params.num_rows * params.q_latent_row_stride, seed);
    out.assign(params.num_rows * params.out_row_stride, kNan);
    lse.assign(dims.heads * params.lse_stride, kNan);

    int32_t num_blocks = 0, max_blocks = 0;
    for (const int32_t n : kv_lens) {
      num_blocks += (n + block_size - 1) / block_size;
      max_blocks = std::max(max_blocks, (n + block_size - 1) / block_size + 2);
    }
    params.block_table_stride = max_blocks;
    params.pages.format = format;
    params.pages.block_size = block_size;
    params.pages.entry_bytes =
        PastWith(KvEntryBytes(format, dims.rank, dims.rope), alignment.entry_bytes);
    params.pages.block_stride = int64_t{params.pages.entry_bytes} * block_size + 64;
    memory.assign((2 * num_blocks + 1) * params.pages.block_stride, std::byte{0xff});
    physical.resize(2 * num_blocks + 1);
    std::iota(physical.begin(), physical.end(), 0);
    std::shuffle(physical.begin(), physical.end(), std::mt19937(seed));
    block_table.assign(params.num_seqs * max_blocks, kUnusedBlock);
    int32_t next = 0;
    for (int32_t s = 0; s < params.num_seqs; ++s) {
      int32_t num_splits = 0;
      for (int32_t begin = 0; begin < kv_lens[s]; begin += split_tokens, ++num_splits) {
        splits.push_back({s, begin, std::min(begin + split_tokens, kv_lens[s])});
      }
      params.max_splits_per_seq = std::max(params.max_splits_per_seq, num_splits);
      for (int32_t i = 0; i * block_size < kv_lens[s]; ++i) {
        block_table[s * max_blocks + i] = physical[next++];
      }
    }
    params.num_splits = static_cast<int32_t>(splits.size());
  }

  // Writes the entries of every sequence with the CPU's StoreKv.
  void Fill(Backend& host, uint32_t seed) {
    const int32_t rank = params.kv_lora_rank, rope = params.qk_rope_head_dim;
    std::vector<int64_t> slots;
    for (int32_t s = 0; s < params.num_seqs; ++s) {
      for (int32_t j = 0; j < kv_lens[s]; ++j) {
        const int64_t block =
            block_table[s * params.block_table_stride + j / params.pages.block_size];
        slots.push_back(block * params.pages.block_size + j % params.pages.block_size);
      }
    }
    const std::vector<float> kv_a = RandomTensor(slots.size() * (rank + rope), seed);
    const std::vector<float> weight(rank, 1.0f), cos(rope / 2, 1.0f), sin(rope / 2, 0.0f);
    const std::vector<int32_t> positions(slots.size(), 0);
    StoreKvParams store;
    store.num_rows = static_cast<int32_t>(slots.size());
    store.kv_a = kv_a.data();
    store.kv_a_row_stride = rank + rope;
    store.kv_lora_rank = rank;
    store.norm_weight = weight.data();
    store.rope = {cos.data(), sin.data(), rope, 1, RopeLayout::kInterleaved};
    store.positions = positions.data();
    store.slots = slots.data();
    store.pages = params.pages;
    store.pages.base = memory.data();
    ASSERT_TRUE(host.StoreKv({}, store).ok());
  }

  AbsorbedDecodeParams params;  // without pointers
  std::vector<int32_t> cu_q, kv_lens, block_table, physical;
  std::vector<std::byte> memory;
  std::vector<DecodeSplit> splits;
  std::vector<float> q, out, lse;
};

class CudaAbsorbedDecodeTest : public DeviceTest, public ::testing::WithParamInterface<KvFormat> {
 protected:
  using DeviceTest::DeviceTest;

  Batch Make(const Dims& dims, int32_t block_size, const std::vector<int32_t>& q_lens,
             const std::vector<int32_t>& kv_lens, int32_t split_tokens, uint32_t seed) {
    Batch batch(dims, GetParam(), block_size, q_lens, kv_lens, split_tokens, seed, alignment_);
    batch.Fill(*host_, seed + 1);
    return batch;
  }
  int64_t WorkspaceBytes(Backend& backend, const AbsorbedDecodeParams& p) {
    return backend.attention().AbsorbedDecodeWorkspaceBytes(p.num_rows, p.max_splits_per_seq,
                                                            p.num_heads, p.kv_lora_rank);
  }
  AbsorbedDecodeParams DeviceParams(const Batch& batch) {
    AbsorbedDecodeParams p = batch.params;
    p.cu_seqlens_q = Upload(batch.cu_q);
    p.kv_len = Upload(batch.kv_lens);
    p.block_table = Upload(batch.block_table);
    p.splits = Upload(batch.splits);
    p.pages.base = UploadBytes(batch.memory);
    p.q_latent = Upload(batch.q);
    p.q_rope = p.q_latent + p.kv_lora_rank;
    p.out = Upload(batch.out);
    p.lse = Upload(batch.lse);
    p.workspace = Workspace(WorkspaceBytes(*device_, p));
    return p;
  }
  // Runs the batch on the CPU, into its own out and lse.
  // In bf16 the results are `exact`, rounded.
  void ExpectRoundedOut(AbsorbedDecodeParams params, const std::vector<float>& exact) {
    params.out = nullptr;
    params.rounded_out = Upload(std::vector<uint16_t>(exact.size(), kUntouched));
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, params).ok());
    EXPECT_EQ(Download(params.rounded_out, exact.size()), RoundWritten(exact));
  }
  void RunOnHost(Batch& batch, const PackedHeadLinear* w_uv = nullptr) {
    AbsorbedDecodeParams p = batch.params;
    p.cu_seqlens_q = batch.cu_q.data();
    p.kv_len = batch.kv_lens.data();
    p.block_table = batch.block_table.data();
    p.splits = batch.splits.data();
    p.pages.base = batch.memory.data();
    p.q_latent = batch.q.data();
    p.q_rope = batch.q.data() + p.kv_lora_rank;
    p.out = batch.out.data();
    p.lse = batch.lse.data();
    std::vector<std::byte> workspace(WorkspaceBytes(*host_, p) + 64);
    p.workspace = workspace.data();
    p.w_uv = w_uv;
    ASSERT_TRUE(host_->attention().AbsorbedDecode({}, p).ok());
  }
  void ExpectClose(const Batch& batch, const AbsorbedDecodeParams& device) {
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out, kTolerance));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse, kTolerance));
  }

  Alignment alignment_;
};

TEST_P(CudaAbsorbedDecodeTest, EqualsTheCpu) {
  for (const Dims& dims : {Dims{16, 512, 64}, Dims{3, 40, 6}, Dims{5, 130, 2}, Dims{1, 9, 0}}) {
    SCOPED_TRACE(dims.rank);
    // Block edges of 16; one token; nothing cached; no rows; several rows; a whole short chunk.
    Batch batch = Make(dims, 16, {1, 1, 1, 1, 1, 0, 4, 3, 20, 2},
                       {1, 15, 16, 17, 0, 5, 130, 3, 50, 1}, 48, 1);
    const AbsorbedDecodeParams device = DeviceParams(batch);
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    RunOnHost(batch);
    ExpectClose(batch, device);  // NaN where nothing is written
    const std::vector<float> once = Download(device.out, batch.out.size());
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    EXPECT_TRUE(BitEqual(Download(device.out, batch.out.size()), once));
  }
}

TEST_P(CudaAbsorbedDecodeTest, SplitsAndValueProjectionEqualTheCpu) {
  const TestWeight weight = MakeWeight({"", DType::kBfloat16}, 4 * 20, 72, 3);
  for (const int32_t split_tokens : {7, 64, 1000}) {
    SCOPED_TRACE(split_tokens);
    Batch batch = Make({4, 72, 8}, 16, {1, 3, 1}, {300, 97, 31}, split_tokens, 2);
    batch.params.v_head_dim = 20;
    batch.params.out_head_stride = 21;
    const auto on_host = host_->PackHeadLinear(weight.tensor, {4, 20, 0, 20, false});
    const auto on_device = device_->PackHeadLinear(weight.tensor, {4, 20, 0, 20, false});
    AbsorbedDecodeParams device = DeviceParams(batch);
    device.w_uv = on_device->get();
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    RunOnHost(batch, on_host->get());
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out,
                         {.abs = 1e-4, .rel = 4e-5, .cosine = 1e-10}));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse, kTolerance));
    ExpectRoundedOut(device, Download(device.out, batch.out.size()));
  }
}

TEST_P(CudaAbsorbedDecodeTest, ASequencesBitsDoNotDependOnItsBatch) {
  const std::vector<int32_t> q_lens = {1, 4, 1, 30}, kv_lens = {40, 290, 1, 150};
  Batch batch = Make({4, 72, 8}, 16, q_lens, kv_lens, 64, 6);
  const AbsorbedDecodeParams all = DeviceParams(batch);
  ASSERT_TRUE(device_->attention().AbsorbedDecode({}, all).ok());
  const std::vector<float> together = Download(all.out, batch.out.size());
  for (int32_t s = 0; s < 4; ++s) {
    // The sequence alone, over the same cache.
    AbsorbedDecodeParams alone = all;
    alone.num_seqs = 1;
    alone.num_rows = alone.max_q_len = q_lens[s];
    alone.cu_seqlens_q = Upload<int32_t>({0, q_lens[s]});
    alone.kv_len = all.kv_len + s;
    alone.block_table = all.block_table + s * all.block_table_stride;
    std::vector<DecodeSplit> splits;
    for (const DecodeSplit& split : batch.splits) {
      if (split.seq == s) splits.push_back({0, split.kv_begin, split.kv_end});
    }
    alone.splits = Upload(splits);
    alone.num_splits = static_cast<int32_t>(splits.size());
    alone.q_latent = all.q_latent + batch.cu_q[s] * all.q_latent_row_stride;
    alone.q_rope = all.q_rope + batch.cu_q[s] * all.q_rope_row_stride;
    const std::vector<float> poison(q_lens[s] * all.out_row_stride, kNan);
    alone.out = Upload(poison);
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, alone).ok());
    EXPECT_TRUE(BitEqual(
        Download(alone.out, poison.size()),
        absl::MakeConstSpan(together).subspan(batch.cu_q[s] * all.out_row_stride, poison.size())));
  }
}

TEST_P(CudaAbsorbedDecodeTest, KeysOfLaterRowsDoNotLeakIntoEarlierOnes) {
  Batch clean = Make({2, 40, 6}, 16, {5}, {70}, 32, 9);
  const AbsorbedDecodeParams params = DeviceParams(clean);
  ASSERT_TRUE(device_->attention().AbsorbedDecode({}, params).ok());
  const std::vector<float> before = Download(params.out, clean.out.size());
  for (int32_t row = 0; row < 4; ++row) {
    Batch poisoned = clean;
    const KvPages& pages = poisoned.params.pages;
    for (int32_t key = 70 - 5 + row + 1; key < 70; ++key) {
      std::fill_n(poisoned.memory.begin() + poisoned.block_table[key / 16] * pages.block_stride +
                      key % 16 * pages.entry_bytes,
                  pages.entry_bytes, std::byte{0xff});
    }
    const AbsorbedDecodeParams device = DeviceParams(poisoned);
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    const std::vector<float> after = Download(device.out, clean.out.size());
    const int64_t end = (row + 1) * params.out_row_stride;
    EXPECT_TRUE(BitEqual(absl::MakeConstSpan(after).subspan(0, end),
                         absl::MakeConstSpan(before).subspan(0, end)));
    EXPECT_TRUE(std::isnan(after[end]));
  }
}

TEST_P(CudaAbsorbedDecodeTest, AMissingBlockIsReported) {
  Batch batch = Make({2, 24, 4}, 16, {1, 2}, {20, 40}, 16, 4);
  batch.block_table[batch.params.block_table_stride + 2] = -1;
  ASSERT_TRUE(device_->attention().AbsorbedDecode({}, DeviceParams(batch)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 1 has no block for position"));
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaAbsorbedDecodeTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent));

// A device that rounds to bf16 has its own kernel for DeepSeek's latent in bf16 pages.
class CudaRoundingDecodeTest : public CudaAbsorbedDecodeTest {
 protected:
  CudaRoundingDecodeTest() : CudaAbsorbedDecodeTest(/*bfloat16=*/true) {
    alignment_ = {.entry_bytes = 16, .query_elements = 4};
  }
};

TEST_P(CudaRoundingDecodeTest, EqualsTheCpu) {
  // Sequences that end within a tile of 64 keys, without keys or rows; tiles of 16, 32 and 64 query
  // vectors, that span rows; blocks of keys shorter and longer than a tile; thread blocks with one
  // tile, with many of one sequence and with many sequences.
  std::vector<int32_t> many_q(90, 1), many_kv;
  for (int32_t s = 0; s < 90; ++s) many_kv.push_back(1 + s * 7 % 300);
  struct Case {
    int32_t heads, block_size;
    std::vector<int32_t> q_lens, kv_lens;
  };
  for (const Case& c : {Case{16, 64, {1}, {1000}},
                        {16, 64, {1, 1}, {30000, 9001}},
                        {16, 16, {1, 1, 0, 1, 3, 1}, {64, 65, 5, 0, 130, 200}},
                        {5, 128, {4, 20, 1}, {4, 90, 1}},
                        {16, 64, many_q, many_kv},
                        {20, 32, {3, 0, 1, 2}, {100, 70, 0, 65}},
                        {32, 64, {1, 2}, {9000, 3001}},
                        {64, 64, {1, 2}, {4000, 9001}},
                        {72, 8, {1, 3}, {1000, 200}},
                        {128, 64, {1, 0, 2, 1}, {130, 70, 700, 0}}}) {
    SCOPED_TRACE(testing::Message() << c.heads << " heads, " << c.kv_lens.size());
    Batch batch = Make({c.heads, 512, 64}, c.block_size, c.q_lens, c.kv_lens, 1024, 1);
    const AbsorbedDecodeParams device = DeviceParams(batch);
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    RunOnHost(batch);
    // bf16 queries and weights: 2^-9 of each of a sum of unit-sized values.
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out,
                         {.abs = 2e-2, .rel = 2.0 / 128, .cosine = 1e-5}));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse,
                         {.abs = 2e-2, .rel = 2e-3, .cosine = 1e-6}));
    const std::vector<float> once = Download(device.out, batch.out.size());
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    EXPECT_TRUE(BitEqual(Download(device.out, batch.out.size()), once));
  }
}

TEST_P(CudaRoundingDecodeTest, ValueProjectionEqualsTheCpu) {
  // One row, a few, more than a group of 16, so many that a block has all columns; columns that no
  // block can have all of.
  struct Case {
    int32_t num_seqs, q_len, v_dim;
  };
  constexpr int32_t kHeads = 16;
  for (const Case& c : {Case{1, 1, 128}, {3, 2, 128}, {20, 1, 96}, {35, 1, 128}, {10, 4, 160}}) {
    SCOPED_TRACE(testing::Message() << c.num_seqs << " x " << c.q_len << ", " << c.v_dim);
    std::vector<int32_t> kv_lens;
    for (int32_t s = 0; s < c.num_seqs; ++s) kv_lens.push_back(c.q_len + s * 37 % 200);
    Batch batch =
        Make({kHeads, 512, 64}, 64, std::vector<int32_t>(c.num_seqs, c.q_len), kv_lens, 1024, 2);
    batch.params.v_head_dim = c.v_dim;
    const TestWeight weight = MakeWeight({"", DType::kBfloat16}, kHeads * c.v_dim, 512, 3);
    const HeadSlice slice{
        .num_heads = kHeads, .head_rows = c.v_dim, .row_begin = 0, .row_count = c.v_dim};
    const auto on_host = host_->PackHeadLinear(weight.tensor, slice);
    const auto on_device = device_->PackHeadLinear(weight.tensor, slice);
    AbsorbedDecodeParams device = DeviceParams(batch);
    device.w_uv = on_device->get();
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    RunOnHost(batch, on_host->get());
    // Latents are rounded once more; a result is a sum of 512 products.
    EXPECT_TRUE(AllClose(Download(device.out, batch.out.size()), batch.out,
                         {.abs = 0.4, .rel = 2.0 / 128, .cosine = 2e-5}));
    EXPECT_TRUE(AllClose(Download(device.lse, batch.lse.size()), batch.lse,
                         {.abs = 2e-2, .rel = 2e-3, .cosine = 1e-6}));
    const std::vector<float> once = Download(device.out, batch.out.size());
    ASSERT_TRUE(device_->attention().AbsorbedDecode({}, device).ok());
    EXPECT_TRUE(BitEqual(Download(device.out, batch.out.size()), once));
    ExpectRoundedOut(device, once);
  }
}

TEST_P(CudaRoundingDecodeTest, AMissingBlockIsReported) {
  Batch batch = Make({16, 512, 64}, 16, {1, 2}, {20, 40}, 64, 4);
  batch.block_table[batch.params.block_table_stride + 2] = -1;
  ASSERT_TRUE(device_->attention().AbsorbedDecode({}, DeviceParams(batch)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 1 has no block for position"));
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaRoundingDecodeTest, ::testing::Values(KvFormat::kBfloat16));

}  // namespace
}  // namespace kernels

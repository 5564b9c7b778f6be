#include "kernels/cpu/absorbed_decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/head_linear.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/ragged_mha.h"
#include "kernels/store_kv.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Dims {
  int32_t heads, rank, rope;
};

// A batch over a paged cache of twice the blocks it needs.  Everything that is nobody's (other
// blocks, the rest of a last block, padding, outputs, workspace) is NaN.
struct Batch {
  Batch(const Dims& dims, KvFormat format, int32_t block_size, std::vector<int32_t> q_lens,
        std::vector<int32_t> kv_lens, int32_t split_tokens, uint32_t seed)
      : dims(dims), q_lens(std::move(q_lens)), kv_lens(std::move(kv_lens)) {
    num_seqs = static_cast<int32_t>(this->q_lens.size());
    cu_q.push_back(0);
    for (const int32_t n : this->q_lens) cu_q.push_back(cu_q.back() + n);
    q_head_stride = dims.rank + dims.rope + 1;
    q_row_stride = dims.heads * q_head_stride + 2;
    out_head_stride = dims.rank + 3;
    out_row_stride = dims.heads * out_head_stride + 1;
    lse_stride = cu_q.back() + 4;
    q = RandomTensor(cu_q.back() * q_row_stride, seed);
    out.assign(cu_q.back() * out_row_stride, kNan);
    lse.assign(dims.heads * lse_stride, kNan);

    int32_t num_blocks = 0;
    for (const int32_t n : this->kv_lens) {
      num_blocks += (n + block_size - 1) / block_size;
      max_blocks = std::max(max_blocks, (n + block_size - 1) / block_size);
    }
    max_blocks += 2;
    pages.format = format;
    pages.block_size = block_size;
    pages.entry_bytes = KvEntryBytes(format, dims.rank, dims.rope) + 4;
    pages.entry_bytes = (pages.entry_bytes + 3) / 4 * 4;
    pages.block_stride = int64_t{pages.entry_bytes} * block_size + 64;
    physical.resize(2 * num_blocks + 1);
    std::iota(physical.begin(), physical.end(), 0);
    std::shuffle(physical.begin(), physical.end(), std::mt19937(seed));
    for (int32_t s = 0; s < num_seqs; ++s) {
      entries.push_back(RandomTensor(this->kv_lens[s] * (dims.rank + dims.rope), seed + 10 + s));
    }
    WriteCache();
    for (int32_t s = 0; s < num_seqs; ++s) {
      for (int32_t begin = 0; begin < this->kv_lens[s]; begin += split_tokens) {
        splits.push_back({s, begin, std::min(begin + split_tokens, this->kv_lens[s])});
      }
    }
  }

  void WriteCache() {
    memory.assign(physical.size() * pages.block_stride, std::byte{0xff});
    pages.base = memory.data();
    block_table.assign(num_seqs * max_blocks, -1);
    decoded.clear();
    int32_t next = 0;
    for (int32_t s = 0; s < num_seqs; ++s) {
      decoded.emplace_back(entries[s].size());
      for (int32_t j = 0; j < kv_lens[s]; ++j) {
        const int32_t index = j / pages.block_size;
        if (j % pages.block_size == 0) block_table[s * max_blocks + index] = physical[next++];
        const EntryPlace place =
            PlaceOfSlot(pages, int64_t{block_table[s * max_blocks + index]} * pages.block_size +
                                   j % pages.block_size);
        const int64_t at = int64_t{j} * (dims.rank + dims.rope);
        StoreEntry(pages, place, &entries[s][at], dims.rank, &entries[s][at + dims.rank],
                   dims.rope);
        LoadEntry(pages, place, dims.rank, dims.rope, &decoded[s][at], &decoded[s][at + dims.rank]);
      }
    }
  }

  int32_t MaxSplitsPerSeq() const {
    std::vector<int32_t> counts(num_seqs, 1);
    for (const DecodeSplit& split : splits) ++counts[split.seq];
    return *std::max_element(counts.begin(), counts.end());
  }

  AbsorbedDecodeParams Params() {
    const int64_t bytes =
        AbsorbedDecodeWorkspaceBytes(cu_q.back(), MaxSplitsPerSeq(), dims.heads, dims.rank);
    workspace.assign(bytes + 64, std::byte{0xff});
    AbsorbedDecodeParams p;
    p.num_seqs = num_seqs;
    p.num_rows = cu_q.back();
    p.max_q_len = *std::max_element(q_lens.begin(), q_lens.end());
    p.num_heads = dims.heads;
    p.kv_lora_rank = dims.rank;
    p.qk_rope_head_dim = dims.rope;
    p.softmax_scale = 0.1f;
    p.cu_seqlens_q = cu_q.data();
    p.kv_len = kv_lens.data();
    p.block_table = block_table.data();
    p.block_table_stride = max_blocks;
    p.splits = splits.data();
    p.num_splits = static_cast<int32_t>(splits.size());
    p.max_splits_per_seq = MaxSplitsPerSeq();
    p.pages = pages;
    p.q_latent = q.data();
    p.q_latent_row_stride = q_row_stride;
    p.q_latent_head_stride = q_head_stride;
    p.q_rope = q.data() + dims.rank;
    p.q_rope_row_stride = q_row_stride;
    p.q_rope_head_stride = q_head_stride;
    p.out = out.data();
    p.out_row_stride = out_row_stride;
    p.out_head_stride = out_head_stride;
    p.lse = lse.data();
    p.lse_stride = lse_stride;
    p.workspace = workspace.data();
    return p;
  }

  void Run(ThreadPool& pool) {
    ASSERT_TRUE(AbsorbedDecode(pool, Params()).ok());
    for (size_t i = workspace.size() - 64; i < workspace.size(); ++i) {
      ASSERT_EQ(workspace[i], std::byte{0xff}) << "workspace overrun";
    }
  }

  // Of one sequence: [q_len, heads, rank] and then [q_len, heads] of lse.
  std::vector<float> ResultsOf(int32_t seq) const {
    std::vector<float> values;
    for (int32_t row = cu_q[seq]; row < cu_q[seq + 1]; ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) {
        const float* o = out.data() + row * out_row_stride + h * out_head_stride;
        values.insert(values.end(), o, o + dims.rank);
      }
    }
    for (int32_t row = cu_q[seq]; row < cu_q[seq + 1]; ++row) {
      for (int32_t h = 0; h < dims.heads; ++h) values.push_back(lse[h * lse_stride + row]);
    }
    return values;
  }
  std::vector<float> Results() const {
    std::vector<float> values;
    for (int32_t s = 0; s < num_seqs; ++s) {
      const std::vector<float> of_seq = ResultsOf(s);
      values.insert(values.end(), of_seq.begin(), of_seq.end());
    }
    return values;
  }

  std::vector<double> Reference() const {
    std::vector<double> values;
    for (int32_t s = 0; s < num_seqs; ++s) {
      std::vector<double> lses;
      for (int32_t r = 0; r < q_lens[s]; ++r) {
        for (int32_t h = 0; h < dims.heads; ++h) {
          const float* query = q.data() + (cu_q[s] + r) * q_row_stride + h * q_head_stride;
          std::vector<double> scores;
          double sum = 0;
          for (int32_t j = 0; j <= kv_lens[s] - q_lens[s] + r; ++j) {
            double dot = 0;
            for (int32_t d = 0; d < dims.rank + dims.rope; ++d) {
              dot += static_cast<double>(query[d]) *
                     decoded[s][int64_t{j} * (dims.rank + dims.rope) + d];
            }
            scores.push_back(0.1f * dot);
            sum += std::exp(scores.back());
          }
          lses.push_back(scores.empty() ? -kInfinity : std::log(sum));
          for (int32_t d = 0; d < dims.rank; ++d) {
            double o = 0;
            for (size_t j = 0; j < scores.size(); ++j) {
              o += std::exp(scores[j]) / sum * decoded[s][j * (dims.rank + dims.rope) + d];
            }
            values.push_back(o);
          }
        }
      }
      values.insert(values.end(), lses.begin(), lses.end());
    }
    return values;
  }

  Dims dims;
  std::vector<int32_t> q_lens, kv_lens, cu_q, physical, block_table;
  int32_t num_seqs = 0, max_blocks = 0;
  int64_t q_row_stride, q_head_stride, out_row_stride, out_head_stride, lse_stride;
  KvPages pages;
  std::vector<std::byte> memory, workspace;
  std::vector<DecodeSplit> splits;
  std::vector<std::vector<float>> entries, decoded;  // [seq][kv_len, rank + rope]
  std::vector<float> q, out, lse;
};

// Scores reach about 15: float32 rounding of sums of 576 products is what differs.
constexpr numerics::Tolerance kTolerance{.abs = 5e-6, .rel = 2e-5, .cosine = 1e-10};

class AbsorbedDecodeTest : public ::testing::TestWithParam<KvFormat> {
 protected:
  ThreadPool pool_{2};
};

TEST_P(AbsorbedDecodeTest, EqualsTheReference) {
  for (const Dims& dims : {Dims{16, 512, 64}, Dims{3, 40, 6}, Dims{5, 130, 2}, Dims{1, 9, 0}}) {
    SCOPED_TRACE(dims.rank);
    // Block edges of 16; one token; nothing cached; no rows; several rows; a whole short chunk.
    Batch batch(dims, GetParam(), 16, {1, 1, 1, 1, 1, 0, 4, 3, 20, 2},
                {1, 15, 16, 17, 0, 5, 130, 3, 50, 1}, 48, 1);
    batch.Run(pool_);
    EXPECT_TRUE(AllClose(batch.Results(), batch.Reference(), kTolerance));
    EXPECT_TRUE(std::isnan(batch.out.back()));
    EXPECT_TRUE(std::isnan(batch.out[dims.rank]));
    EXPECT_TRUE(std::isnan(batch.lse.back()));
  }
}

TEST_P(AbsorbedDecodeTest, ARowThatSeesNothingGivesExactlyZero) {
  // kv_len 0, and more rows than keys.
  Batch batch({2, 24, 4}, GetParam(), 8, {1, 3}, {0, 1}, 16, 4);
  batch.Run(pool_);
  const std::vector<float> none = batch.ResultsOf(0);
  EXPECT_THAT(absl::MakeConstSpan(none).subspan(0, 48), ::testing::Each(0.0f));
  EXPECT_THAT(absl::MakeConstSpan(none).subspan(48), ::testing::Each(-kInfinity));
  const std::vector<float> few = batch.ResultsOf(1);  // rows 0 and 1 of 3 see nothing
  EXPECT_THAT(absl::MakeConstSpan(few).subspan(0, 96), ::testing::Each(0.0f));
  EXPECT_NE(few[96], 0.0f);
}

TEST_P(AbsorbedDecodeTest, SplitsAreInvisible) {
  Batch one({4, 72, 8}, GetParam(), 16, {1, 3, 1}, {300, 290, 31}, 1000, 2);
  one.Run(pool_);
  const std::vector<double> reference = one.Reference();
  EXPECT_TRUE(AllClose(one.Results(), reference, kTolerance));
  for (const int32_t split_tokens : {1, 7, 64, 256}) {
    SCOPED_TRACE(split_tokens);
    Batch many({4, 72, 8}, GetParam(), 16, {1, 3, 1}, {300, 290, 31}, split_tokens, 2);
    many.Run(pool_);
    EXPECT_TRUE(AllClose(many.Results(), reference, kTolerance));
  }
}

TEST_P(AbsorbedDecodeTest, ShuffledBlocksChangeNoBit) {
  Batch batch({4, 72, 8}, GetParam(), 16, {1, 3}, {300, 97}, 64, 2);
  batch.Run(pool_);
  const std::vector<float> results = batch.Results();
  for (uint32_t seed = 0; seed < 3; ++seed) {
    std::shuffle(batch.physical.begin(), batch.physical.end(), std::mt19937(100 + seed));
    batch.WriteCache();
    batch.Run(pool_);
    EXPECT_TRUE(BitEqual(batch.Results(), results));
  }
}

TEST_P(AbsorbedDecodeTest, ASequencesBitsDoNotDependOnItsBatchOrOnThreads) {
  // Enough splits and rows for several waves.
  const std::vector<int32_t> q_lens = {1, 4, 1, 30}, kv_lens = {40, 290, 1, 150};
  Batch batch({4, 72, 8}, GetParam(), 16, q_lens, kv_lens, 16, 6);
  ThreadPool many(3), single(1);
  batch.Run(many);
  for (int32_t s = 0; s < 4; ++s) {
    Batch alone({4, 72, 8}, GetParam(), 16, {q_lens[s]}, {kv_lens[s]}, 16, 6);
    alone.entries = {batch.entries[s]};
    alone.WriteCache();
    std::copy_n(batch.q.begin() + batch.cu_q[s] * batch.q_row_stride, alone.q.size(),
                alone.q.begin());
    alone.Run(single);
    EXPECT_TRUE(BitEqual(alone.Results(), batch.ResultsOf(s)));
  }
}

TEST_P(AbsorbedDecodeTest, KeysOfLaterRowsDoNotLeakIntoEarlierOnes) {
  Batch clean({2, 40, 6}, GetParam(), 16, {5}, {70}, 32, 9);
  clean.Run(pool_);
  const std::vector<float> before = clean.ResultsOf(0);
  for (int32_t row = 0; row < 4; ++row) {
    Batch poisoned({2, 40, 6}, GetParam(), 16, {5}, {70}, 32, 9);
    for (int32_t key = 70 - 5 + row + 1; key < 70; ++key) {
      std::byte* entry = EntryAt(
          poisoned.pages,
          PlaceOfSlot(poisoned.pages, int64_t{poisoned.block_table[key / 16]} * 16 + key % 16));
      std::fill_n(entry, poisoned.pages.entry_bytes, std::byte{0xff});
    }
    poisoned.Run(pool_);
    const std::vector<float> after = poisoned.ResultsOf(0);
    EXPECT_TRUE(BitEqual(absl::MakeConstSpan(after).subspan(0, (row + 1) * 80),
                         absl::MakeConstSpan(before).subspan(0, (row + 1) * 80)));
    EXPECT_TRUE(std::isnan(after[(row + 1) * 80]));
  }
}

// Both forms of MLA on the same numbers: W_UK and W_UV absorbed, or K and V decompressed per head.
TEST_P(AbsorbedDecodeTest, EqualsUnabsorbedAttention) {
  const int32_t heads = 4, rank = 96, rope = 16, nope = 24, v_dim = 20, rows = 3, keys = 150;
  Batch batch({heads, rank, rope}, GetParam(), 32, {rows}, {keys}, 64, 12);
  const std::vector<float> w_uk = RandomTensor(heads * nope * rank, 50, 0.1f);
  const std::vector<float> w_uv = RandomTensor(heads * v_dim * rank, 51, 0.1f);
  const std::vector<float> q_nope = RandomTensor(rows * heads * nope, 52);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < rank; ++c) {
        double sum = 0;
        for (int64_t d = 0; d < nope; ++d) {
          sum += static_cast<double>(w_uk[(h * nope + d) * rank + c]) *
                 q_nope[(t * heads + h) * nope + d];
        }
        batch.q[t * batch.q_row_stride + h * batch.q_head_stride + c] = static_cast<float>(sum);
      }
    }
  }
  const WeightTensor tensor{w_uv.data(), DType::kFloat32, heads * v_dim, rank};
  const auto packed = PackHeadLinear(pool_, tensor, {heads, v_dim, 0, v_dim, false});
  ASSERT_TRUE(packed.ok()) << packed.status();
  std::vector<float> absorbed(rows * heads * v_dim, kNan);
  AbsorbedDecodeParams params = batch.Params();
  params.v_head_dim = v_dim;
  params.w_uv = packed->get();
  params.out = absorbed.data();
  params.out_row_stride = heads * v_dim;
  params.out_head_stride = v_dim;
  ASSERT_TRUE(AbsorbedDecode(pool_, params).ok());

  std::vector<float> k_nope(keys * heads * nope), v(keys * heads * v_dim), k_rope(keys * rope);
  for (int64_t j = 0; j < keys; ++j) {
    const float* entry = &batch.decoded[0][j * (rank + rope)];
    std::copy_n(entry + rank, rope, &k_rope[j * rope]);
    const auto decompress = [&](const std::vector<float>& w, int64_t dim, std::vector<float>& to) {
      for (int64_t i = 0; i < heads * dim; ++i) {
        double sum = 0;
        for (int64_t c = 0; c < rank; ++c) sum += static_cast<double>(w[i * rank + c]) * entry[c];
        to[j * heads * dim + i] = static_cast<float>(sum);
      }
    };
    decompress(w_uk, nope, k_nope);
    decompress(w_uv, v_dim, v);
  }
  const std::vector<int32_t> cu_q = {0, rows}, cu_kv = {0, keys};
  std::vector<float> unabsorbed(rows * heads * v_dim, kNan), lse(heads * rows, kNan);
  RaggedMhaParams mha;
  mha.num_seqs = 1;
  mha.num_rows = rows;
  mha.num_heads = heads;
  mha.qk_nope_head_dim = nope;
  mha.qk_rope_head_dim = rope;
  mha.v_head_dim = v_dim;
  mha.softmax_scale = 0.1f;
  mha.cu_seqlens_q = cu_q.data();
  mha.cu_seqlens_kv = cu_kv.data();
  mha.q_nope = q_nope.data();
  mha.q_nope_row_stride = heads * nope;
  mha.q_nope_head_stride = nope;
  mha.q_rope = batch.q.data() + rank;
  mha.q_rope_row_stride = batch.q_row_stride;
  mha.q_rope_head_stride = batch.q_head_stride;
  mha.k_nope = k_nope.data();
  mha.k_nope_row_stride = heads * nope;
  mha.k_nope_head_stride = nope;
  mha.k_rope = k_rope.data();
  mha.k_rope_row_stride = rope;
  mha.v = v.data();
  mha.v_row_stride = heads * v_dim;
  mha.v_head_stride = v_dim;
  mha.out = unabsorbed.data();
  mha.out_row_stride = heads * v_dim;
  mha.out_head_stride = v_dim;
  mha.lse = lse.data();
  mha.lse_stride = rows;
  ASSERT_TRUE(RaggedMha(pool_, mha).ok());
  EXPECT_TRUE(AllClose(absorbed, unabsorbed, {.abs = 5e-6, .rel = 1e-5, .cosine = 1e-10}));
  for (int32_t h = 0; h < heads; ++h) {
    EXPECT_TRUE(AllClose(absl::MakeConstSpan(&batch.lse[h * batch.lse_stride], rows),
                         absl::MakeConstSpan(&lse[h * rows], rows), {.abs = 5e-6, .rel = 1e-5}));
  }
}

TEST_P(AbsorbedDecodeTest, RefusesWhatCannotBe) {
  Batch batch({2, 24, 4}, GetParam(), 8, {1, 2}, {20, 9}, 16, 4);
  const auto refused = [&](auto change) {
    AbsorbedDecodeParams params = batch.Params();
    change(params);
    const absl::Status status = AbsorbedDecode(pool_, params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return status.ToString();
  };
  refused([](AbsorbedDecodeParams& p) { p.num_seqs = -1; });
  refused([](AbsorbedDecodeParams& p) { p.num_heads = 0; });
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { p.num_rows = 2; }),
              HasSubstr("num_rows is 2, the sequences have 3"));
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { p.max_q_len = 1; }),
              HasSubstr("sequence 1 has 2 rows (max_q_len 1)"));
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { p.max_splits_per_seq = 1; }),
              HasSubstr("sequence 0 has 2 splits, at most 1"));
  refused([](AbsorbedDecodeParams& p) { p.q_latent = nullptr; });
  refused([](AbsorbedDecodeParams& p) { p.workspace = nullptr; });
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { p.out = nullptr; }),
              HasSubstr("one of out and rounded_out"));
  uint16_t rounded = 0;
  EXPECT_THAT(refused([&](AbsorbedDecodeParams& p) { p.out = nullptr, p.rounded_out = &rounded; }),
              HasSubstr("rounded_out without w_uv"));
  refused([](AbsorbedDecodeParams& p) { p.pages.entry_bytes /= 2; });
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { --p.num_splits; }),
              HasSubstr("splits of sequence 1 cover 0 keys of 9"));
  std::vector<DecodeSplit> splits = batch.splits;
  splits[1].kv_begin += 1;
  EXPECT_THAT(refused([&](AbsorbedDecodeParams& p) { p.splits = splits.data(); }),
              HasSubstr("expected it to begin at 16"));
  splits = batch.splits;
  splits[2].seq = 7;
  refused([&](AbsorbedDecodeParams& p) { p.splits = splits.data(); });
  splits[2].seq = -1;
  refused([&](AbsorbedDecodeParams& p) { p.splits = splits.data(); });
  std::vector<int32_t> block_table = batch.block_table;
  block_table[2] = -1;
  EXPECT_THAT(refused([&](AbsorbedDecodeParams& p) { p.block_table = block_table.data(); }),
              HasSubstr("sequence 0 with kv_len 20 has no block at index 2"));
  EXPECT_THAT(refused([](AbsorbedDecodeParams& p) { p.block_table_stride = 1; }),
              HasSubstr("no block at index"));
  EXPECT_THAT(batch.out, ::testing::Each(::testing::IsNan()));
}

INSTANTIATE_TEST_SUITE_P(Formats, AbsorbedDecodeTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent));

}  // namespace
}  // namespace kernels::cpu

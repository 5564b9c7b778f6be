// The rows of sparse attention: DeepSeek-V3.2's decode over chosen latents, the indexer's logits
// and its selection.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/kernel_bench.h"
#include "kernels/store_kv.h"

namespace bench {
namespace {

constexpr int32_t kRank = 512;
constexpr int32_t kRope = 64;
constexpr int32_t kBlock = 64;  // tokens
constexpr int32_t kTopK = 2048;
constexpr int32_t kIndexHeads = 64;
constexpr int32_t kIndexDim = 128;

// Pages full of normed entries, an index key beside each latent.
struct Cache {
  kernels::KvPages latents;
  kernels::KvPages index_keys;
};
Cache MakeCache(KernelBench& bench, kernels::KvFormat format, int32_t num_slots) {
  constexpr int32_t kRows = 32768;
  const auto pages = [&](kernels::KvFormat of, int32_t dim, int32_t rope_dim) {
    kernels::KvPages made;
    made.format = of;
    made.block_size = kBlock;
    made.entry_bytes = kernels::KvEntryBytes(of, dim, rope_dim);
    made.block_stride = int64_t{kBlock} * made.entry_bytes;
    made.base = bench.Bytes(made.block_stride * (num_slots / kBlock));
    return made;
  };
  const bool shared_kv = format == kernels::KvFormat::kFp8SharedKv;
  const int32_t dim = shared_kv ? kRank - kRope : kRank;
  const Cache cache{pages(format, dim, kRope),
                    pages(kernels::KvFormat::kFp8IndexKey, kIndexDim, 0)};
  const float* kv = bench.Floats(int64_t{kRows} * (kRank + kRope));
  const float* ones = bench.Upload(std::vector<float>(kRank + kRope, 1.0f));
  const float* zeros = bench.Upload(std::vector<float>(kRank + kRope, 0.0f));
  std::vector<int64_t> slots(static_cast<size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  const int64_t* all = bench.Upload(slots);
  const int32_t* positions = bench.Upload(std::vector<int32_t>(kRows, 0));
  for (int32_t first = 0; first < num_slots; first += kRows) {
    const absl::Status stored =
        bench.backend().StoreKv({}, {.num_rows = std::min(kRows, num_slots - first),
                                     .kv_a = kv,
                                     .kv_a_row_stride = kRank + kRope,
                                     .kv_lora_rank = dim,
                                     .norm_weight = ones,
                                     .norm_rope = shared_kv,
                                     .rope = {ones, zeros, kRope, 1},
                                     .positions = positions,
                                     .slots = all + first,
                                     .pages = cache.latents,
                                     .index_key = {.dim = kIndexDim,
                                                   .key = kv,
                                                   .key_row_stride = kRank + kRope,
                                                   .norm_weight = ones,
                                                   .norm_bias = zeros,
                                                   .rope = {ones, zeros, kRope, 1},
                                                   .pages = cache.index_keys}});
    if (!stored.ok()) return {};
  }
  return cache;
}

// V3.2: kTopK latents.  V4 (kFp8SharedKv): a window of 128 entries and 512 chosen ones.
struct AttendCase {
  int32_t rows = 1;
  int32_t heads = 128;
  kernels::KvFormat format = kernels::KvFormat::kFp8Latent;
  bool prefill = false;  // rows are of one sequence
  double bar_us = 0;
  double peer_us = 0;
};

void TimeAttention(KernelBench& bench, const AttendCase& c) {
  const bool shared_kv = c.format == kernels::KvFormat::kFp8SharedKv;
  const std::string name =
      absl::StrCat(c.prefill ? "sparse prefill " : "sparse b=", c.rows, " h=", c.heads,
                   shared_kv                                   ? " V4"
                   : c.format == kernels::KvFormat::kFp8Latent ? " fp8"
                                                               : " bf16");
  const int32_t window = shared_kv ? 128 : 0;
  const int32_t chosen = shared_kv ? 512 : kTopK;
  const int32_t width = window + chosen;
  const int32_t dim = shared_kv ? kRank - kRope : kRank;
  if (!bench.Wants(name)) return;
  constexpr int32_t kKeys = 8192;  // of a sequence
  const int32_t num_seqs = c.prefill ? 1 : std::max(c.rows, 16);
  const int32_t num_slots = num_seqs * kKeys;
  const Cache cache = MakeCache(bench, c.format, num_slots);
  std::mt19937 random(1);
  const int32_t rotations = c.prefill ? 1 : 4;
  std::vector<int32_t> indices, slots(kKeys);
  for (int32_t i = 0; i < rotations * c.rows; ++i) {
    std::iota(slots.begin(), slots.end(), i % num_seqs * kKeys);
    for (const int32_t count : {window, chosen}) {
      std::sample(slots.begin(), slots.end(), std::back_inserter(indices), count, random);
    }
  }
  const int32_t* lists = bench.Upload(indices);
  const int64_t row_stride = int64_t{c.heads} * (kRank + kRope);
  const float* q = bench.Floats(c.rows * row_stride, 0.1f);
  float* out = reinterpret_cast<float*>(bench.Bytes(4LL * c.rows * c.heads * kRank));
  kernels::AttentionBackend& attention = bench.backend().attention();
  std::byte* workspace =
      bench.Bytes(attention.SparseDecodeWorkspaceBytes(c.rows, width, c.heads, kRank));
  const float* sink = bench.Floats(c.heads);
  const double entry_bytes = cache.latents.entry_bytes;
  const double key_dim = dim + kRope;
  bench.Time({.name = name,
              .bytes = c.rows * (width * entry_bytes + 4.0 * c.heads * (kRank + key_dim)),
              .flops = 2.0 * c.rows * c.heads * width * (kRank + key_dim),
              .bar_us = c.bar_us,
              .peer_us = c.peer_us},
             rotations, [&](const kernels::LaunchContext& context, int32_t i) {
               kernels::SparseDecodeParams params;
               params.num_rows = c.rows;
               params.num_heads = c.heads;
               params.dim = dim;
               params.rope_dim = kRope;
               params.value_dim = kRank;
               params.softmax_scale = 0.07f;
               const auto source = [&](int32_t first, int32_t count) -> kernels::SparseSource {
                 return {.pages = cache.latents,
                         .indices = lists + int64_t{i} * c.rows * width + first,
                         .index_stride = width,
                         .width = count,
                         .num_slots = num_slots};
               };
               params.sources[0] = source(0, shared_kv ? window : chosen);
               if (shared_kv) {
                 params.sources[1] = source(window, chosen);
                 params.sink = sink;
               }
               params.q = q;
               params.q_row_stride = params.q_rope_row_stride = row_stride;
               params.q_head_stride = params.q_rope_head_stride = kRank + kRope;
               params.q_rope = q + dim;
               params.out = out;
               params.out_row_stride = int64_t{c.heads} * kRank;
               params.out_head_stride = kRank;
               params.workspace = workspace;
               return c.prefill ? attention.SparsePrefill(context, params)
                                : attention.SparseDecode(context, params);
             });
  bench.Free();
}

// The last rows of sequences of `keys` keys each.
struct IndexCase {
  int32_t rows = 1;
  int32_t rows_per_seq = 1;
  int32_t keys = 1;
  double logits_bar_us = 0;
  double logits_peer_us = 0;
  double top_k_bar_us = 0;
};

void TimeIndexer(KernelBench& bench, const IndexCase& c) {
  const std::string logits_name = absl::StrCat("logits ", c.rows, "x", c.keys);
  const std::string top_k_name = absl::StrCat("top_k ", c.rows, "x", c.keys);
  if (!bench.Wants(logits_name) && !bench.Wants(top_k_name)) return;
  constexpr int32_t kMostKeys = 1 << 22;  // of all rotations
  const int32_t num_seqs = c.rows / c.rows_per_seq;
  const int32_t rotations = std::clamp(kMostKeys / (num_seqs * c.keys), 1, 16);
  const int32_t blocks_per_seq = c.keys / kBlock;
  std::vector<int32_t> table(static_cast<size_t>(rotations) * num_seqs * blocks_per_seq);
  std::iota(table.begin(), table.end(), 0);
  std::vector<int32_t> seqs(c.rows), positions(c.rows);
  double visible = 0;  // keys of all rows
  for (int32_t row = 0; row < c.rows; ++row) {
    seqs[row] = row / c.rows_per_seq;
    positions[row] = c.keys - c.rows_per_seq + row % c.rows_per_seq;
    visible += positions[row] + 1;
  }
  const int32_t* tables = bench.Upload(table);
  const kernels::IndexerRows rows{.num_rows = c.rows,
                                  .positions = bench.Upload(positions),
                                  .row_to_seq = bench.Upload(seqs),
                                  .block_table_stride = blocks_per_seq,
                                  .top_k = kTopK};
  const auto of_rotation = [&](int32_t i) {
    kernels::IndexerRows rotated = rows;
    rotated.block_table = tables + int64_t{i} * num_seqs * blocks_per_seq;
    return rotated;
  };
  const Cache cache =
      MakeCache(bench, kernels::KvFormat::kFp8Latent, rotations * num_seqs * c.keys);
  const float* q = bench.Floats(int64_t{c.rows} * kIndexHeads * kIndexDim);
  const float* weights = bench.Floats(int64_t{c.rows} * kIndexHeads);
  const int64_t logits_size = int64_t{c.rows} * c.keys;
  auto* logits =
      reinterpret_cast<float*>(bench.Bytes(rotations * logits_size * int64_t{sizeof(float)}));
  const auto score = [&](const kernels::LaunchContext& context, int32_t i) {
    return bench.backend().IndexerLogits(context, {.rows = of_rotation(i),
                                                   .num_heads = kIndexHeads,
                                                   .head_dim = kIndexDim,
                                                   .scale = 0.01f,
                                                   .q = q,
                                                   .q_row_stride = kIndexHeads * kIndexDim,
                                                   .q_head_stride = kIndexDim,
                                                   .weights = weights,
                                                   .weights_row_stride = kIndexHeads,
                                                   .pages = cache.index_keys,
                                                   .logits = logits + i * logits_size,
                                                   .logits_stride = c.keys});
  };
  if (bench.Wants(logits_name)) {
    const double key_bytes = 1.0 * cache.index_keys.entry_bytes * num_seqs * c.keys;
    bench.Time({.name = logits_name,
                .bytes = key_bytes + 4 * visible,
                .flops = 2 * visible * kIndexHeads * kIndexDim,
                .bar_us = c.logits_bar_us,
                .peer_us = c.logits_peer_us},
               rotations, score);
  }
  if (bench.Wants(top_k_name)) {
    for (int32_t i = 0; i < rotations; ++i) {
      if (!score({}, i).ok()) return;
    }
    int32_t* slots = bench.Upload(std::vector<int32_t>(static_cast<size_t>(c.rows) * kTopK));
    bench.Time({.name = top_k_name, .bytes = 4 * visible, .bar_us = c.top_k_bar_us}, rotations,
               [&](const kernels::LaunchContext& context, int32_t i) {
                 return bench.backend().TopKSlots(context, {.rows = of_rotation(i),
                                                            .block_entries = kBlock,
                                                            .logits = logits + i * logits_size,
                                                            .logits_stride = c.keys,
                                                            .slots = slots,
                                                            .slots_stride = kTopK,
                                                            .slots_width = kTopK});
               });
  }
  bench.Free();
}

// V4-Flash's mixing of streams before a block.
void TimeHyperPre(KernelBench& bench, int32_t rows) {
  constexpr int32_t kStreams = 4, kMixes = kStreams * (2 + kStreams);
  constexpr int64_t kHidden = 4096;
  const std::string name = absl::StrCat("hyper_pre T=", rows);
  if (!bench.Wants(name)) return;
  const std::vector<float> weights(kMixes * kStreams * kHidden, 0.01f);
  const kernels::WeightTensor tensor{.data = weights.data(),
                                     .dtype = kernels::DType::kFloat32,
                                     .rows = kMixes,
                                     .cols = kStreams * kHidden};
  constexpr int32_t kRotations = 32;  // so that the matrices do not stay in the cache
  std::vector<std::unique_ptr<kernels::PackedLinear>> matrices;
  for (int32_t i = 0; i < kRotations; ++i) {
    auto packed = bench.backend().PackLinear({&tensor, 1});
    if (!packed.ok()) return;
    matrices.push_back(*std::move(packed));
  }
  kernels::HyperPreParams params{.num_rows = rows,
                                 .num_streams = kStreams,
                                 .hidden_size = kHidden,
                                 .streams = bench.Floats(rows * kStreams * kHidden),
                                 .base = bench.Floats(kMixes),
                                 .scale = bench.Floats(3),
                                 .mixes = bench.Floats(int64_t{rows} * kMixes),
                                 .output = bench.Floats(rows * kHidden),
                                 .post = bench.Floats(int64_t{rows} * kStreams),
                                 .comb = bench.Floats(int64_t{rows} * kStreams * kStreams)};
  bench.Time({.name = name,
              .bytes = 4.0 * kHidden * (kMixes * kStreams + rows * (kStreams + 1.0)),
              .flops = 2.0 * rows * kMixes * kStreams * kHidden},
             kRotations, [&](const kernels::LaunchContext& context, int32_t i) {
               params.fn = matrices[i].get();
               return bench.backend().HyperPre(context, params);
             });
  bench.Free();
}

}  // namespace

void TimeSparse(KernelBench& bench) {
  bench.Group("sparse decode, top-k 2048 of 8192 keys");
  TimeAttention(bench, {.rows = 1});
  TimeAttention(bench, {.rows = 16});
  TimeAttention(bench, {.rows = 64, .bar_us = 105});
  TimeAttention(bench, {.rows = 128, .bar_us = 205, .peer_us = 186});
  TimeAttention(bench, {.rows = 64, .heads = 16});
  TimeAttention(bench, {.rows = 128, .format = kernels::KvFormat::kBfloat16});
  constexpr kernels::KvFormat kV4 = kernels::KvFormat::kFp8SharedKv;
  TimeAttention(bench, {.rows = 64, .heads = 64, .format = kV4, .bar_us = 35, .peer_us = 43.5});
  TimeAttention(bench, {.rows = 128, .heads = 64, .format = kV4, .bar_us = 45, .peer_us = 45});
  bench.Group("sparse prefill, top-k 2048 of 8192 keys");
  TimeAttention(bench, {.rows = 4096, .prefill = true, .bar_us = 4800});
  TimeAttention(bench, {.rows = 4096,
                        .format = kernels::KvFormat::kBfloat16,
                        .prefill = true,
                        .bar_us = 4800,
                        .peer_us = 4016});
  TimeAttention(bench, {.rows = 4096, .heads = 64, .format = kV4, .prefill = true});
  bench.Group("lightning indexer, rows x keys");
  TimeIndexer(bench, {.rows = 1, .keys = 4096, .logits_peer_us = 3.56});
  TimeIndexer(bench, {.rows = 1, .keys = 32768, .logits_peer_us = 4.42});
  TimeIndexer(bench, {.rows = 1, .keys = 131072, .logits_peer_us = 8.08, .top_k_bar_us = 30});
  TimeIndexer(bench, {.rows = 64, .keys = 4096, .logits_peer_us = 12.87});
  TimeIndexer(
      bench,
      {.rows = 64, .keys = 32768, .logits_bar_us = 80, .logits_peer_us = 74.6, .top_k_bar_us = 30});
  TimeIndexer(bench, {.rows = 64, .keys = 131072, .logits_peer_us = 297.09});
  TimeIndexer(bench, {.rows = 4096, .rows_per_seq = 4096, .keys = 8192, .logits_peer_us = 434.2});
  TimeIndexer(bench, {.rows = 4096,
                      .rows_per_seq = 4096,
                      .keys = 65536,
                      .logits_bar_us = 5500,
                      .logits_peer_us = 4570});
  bench.Group("V4's streams");
  for (const int32_t rows : {1, 16, 64, 4096}) TimeHyperPre(bench, rows);
}

}  // namespace bench

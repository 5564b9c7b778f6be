// How fast one core attends, stores and samples, at the shapes of DeepSeek-V2-Lite: 16 heads,
// latent rank 512, 64 rotary and 128 other dimensions a head, blocks of 64 tokens.
//   attention_speed
// Prints the least processor time of some runs, so that a busy machine matters little.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/absorbed_decode.h"
#include "kernels/cpu/gather_kv.h"
#include "kernels/cpu/ragged_mha.h"
#include "kernels/cpu/sampler.h"
#include "kernels/cpu/store_kv.h"

namespace {

using kernels::KvFormat;

constexpr int64_t kHeads = 16, kRank = 512, kRope = 64, kNope = 128, kV = 128;
constexpr int32_t kBlockSize = 64;
constexpr double kScale = 0.1147;
constexpr int kRuns = 9;

std::vector<float> Random(int64_t size) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Best(const std::function<void()>& run) {
  double best = 1e30;
  for (int i = 0; i < kRuns; ++i) {
    const double start = ThreadSeconds();
    run();
    best = std::min(best, ThreadSeconds() - start);
  }
  return best;
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "attention_speed: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

void Prefill(kernels::cpu::ThreadPool& pool, int32_t length) {
  const std::vector<float> q = Random(length * kHeads * (kNope + kRope));
  const std::vector<float> kv = Random(length * kHeads * (kNope + kV));
  const std::vector<float> k_rope = Random(length * kRope);
  std::vector<float> out(length * kHeads * kV);
  const int32_t cu_seqlens[] = {0, length};
  kernels::RaggedMhaParams params;
  params.num_seqs = 1;
  params.num_rows = length;
  params.num_heads = kHeads;
  params.qk_nope_head_dim = kNope;
  params.qk_rope_head_dim = kRope;
  params.v_head_dim = kV;
  params.softmax_scale = kScale;
  params.cu_seqlens_q = cu_seqlens;
  params.cu_seqlens_kv = cu_seqlens;
  params.q_nope = q.data();
  params.q_rope = q.data() + kNope;
  params.q_nope_row_stride = params.q_rope_row_stride = kHeads * (kNope + kRope);
  params.q_nope_head_stride = params.q_rope_head_stride = kNope + kRope;
  params.k_nope = kv.data();
  params.v = kv.data() + kNope;
  params.k_nope_row_stride = params.v_row_stride = kHeads * (kNope + kV);
  params.k_nope_head_stride = params.v_head_stride = kNope + kV;
  params.k_rope = k_rope.data();
  params.k_rope_row_stride = kRope;
  params.out = out.data();
  params.out_row_stride = kHeads * kV;
  params.out_head_stride = kV;
  const double seconds = Best([&] { Check(RaggedMha(pool, params)); });
  const double pairs = 0.5 * length * (length + 1.0) * kHeads;
  std::printf("ragged_mha       %5d tokens            %9.3f ms  %6.1f GFLOP/s\n", length,
              seconds * 1e3, 2e-9 * pairs * (kNope + kRope + kV) / seconds);
}

void Decode(kernels::cpu::ThreadPool& pool, KvFormat format, const char* name, int32_t kv_len,
            int32_t num_seqs) {
  kernels::KvPages pages;
  pages.format = format;
  pages.block_size = kBlockSize;
  pages.entry_bytes = kernels::KvEntryBytes(format, kRank, kRope);
  pages.block_stride = int64_t{pages.entry_bytes} * kBlockSize;
  const int32_t blocks_per_seq = (kv_len + kBlockSize - 1) / kBlockSize;
  const int32_t num_keys = kv_len * num_seqs;
  std::vector<std::byte> cache(pages.block_stride * blocks_per_seq * num_seqs);
  pages.base = cache.data();
  std::vector<int32_t> block_table(num_seqs * blocks_per_seq), kv_lens(num_seqs, kv_len);
  std::vector<int32_t> cu_seqlens_q, positions(num_keys);
  std::vector<int64_t> slots;
  std::vector<kernels::DecodeSplit> splits;
  for (int32_t i = 0; i <= num_seqs; ++i) cu_seqlens_q.push_back(i);
  for (int32_t seq = 0; seq < num_seqs; ++seq) {
    for (int32_t i = 0; i < blocks_per_seq; ++i) {
      block_table[seq * blocks_per_seq + i] = seq * blocks_per_seq + i;
    }
    for (int32_t j = 0; j < kv_len; ++j) {
      slots.push_back(int64_t{seq} * blocks_per_seq * kBlockSize + j);
      positions[slots.size() - 1] = j;
    }
    for (int32_t begin = 0; begin < kv_len; begin += 256) {
      splits.push_back({seq, begin, std::min(begin + 256, kv_len)});
    }
  }

  const std::vector<float> kv_a = Random(num_keys * (kRank + kRope)), weight = Random(kRank);
  const std::vector<float> cos = Random(kv_len * kRope / 2), sin = Random(kv_len * kRope / 2);
  kernels::StoreKvParams store;
  store.num_rows = num_keys;
  store.kv_a = kv_a.data();
  store.kv_a_row_stride = kRank + kRope;
  store.kv_lora_rank = kRank;
  store.norm_weight = weight.data();
  store.rope = {cos.data(), sin.data(), kRope, kv_len, kernels::RopeLayout::kInterleaved};
  store.positions = positions.data();
  store.slots = slots.data();
  store.pages = pages;
  const double store_seconds = Best([&] { Check(StoreKv(pool, store)); });

  std::vector<float> latent(num_keys * kRank), k_rope(num_keys * kRope);
  kernels::GatherKvParams gather;
  gather.num_rows = num_keys;
  gather.slots = slots.data();
  gather.pages = pages;
  gather.kv_lora_rank = kRank;
  gather.rope_dim = kRope;
  gather.latent = latent.data();
  gather.latent_row_stride = kRank;
  gather.k_rope = k_rope.data();
  gather.k_rope_row_stride = kRope;
  const double gather_seconds = Best([&] { Check(GatherKv(pool, gather)); });

  const std::vector<float> q = Random(num_seqs * kHeads * (kRank + kRope));
  std::vector<float> out(num_seqs * kHeads * kRank);
  std::vector<std::byte> workspace(
      kernels::cpu::AbsorbedDecodeWorkspaceBytes(num_seqs, (kv_len + 255) / 256, kHeads, kRank));
  kernels::AbsorbedDecodeParams params;
  params.num_seqs = num_seqs;
  params.num_rows = num_seqs;
  params.max_q_len = 1;
  params.num_heads = kHeads;
  params.kv_lora_rank = kRank;
  params.qk_rope_head_dim = kRope;
  params.softmax_scale = kScale / 4;
  params.cu_seqlens_q = cu_seqlens_q.data();
  params.kv_len = kv_lens.data();
  params.block_table = block_table.data();
  params.block_table_stride = blocks_per_seq;
  params.splits = splits.data();
  params.num_splits = static_cast<int32_t>(splits.size());
  params.max_splits_per_seq = (kv_len + 255) / 256;
  params.pages = pages;
  params.q_latent = q.data();
  params.q_rope = q.data() + kRank;
  params.q_latent_row_stride = params.q_rope_row_stride = kHeads * (kRank + kRope);
  params.q_latent_head_stride = params.q_rope_head_stride = kRank + kRope;
  params.out = out.data();
  params.out_row_stride = kHeads * kRank;
  params.out_head_stride = kRank;
  params.workspace = workspace.data();
  const double seconds = Best([&] { Check(AbsorbedDecode(pool, params)); });
  std::printf("absorbed_decode  %5d keys x %2d %s %9.3f ms  %6.1f GFLOP/s\n", kv_len, num_seqs,
              name, seconds * 1e3, 2e-9 * num_keys * kHeads * (2 * kRank + kRope) / seconds);
  std::printf("store_kv                        %s %9.3f us a row\n", name,
              store_seconds / num_keys * 1e6);
  std::printf("gather_kv                       %s %9.3f us a row\n", name,
              gather_seconds / num_keys * 1e6);
}

void Sample(const char* name, int32_t vocab_size, const kernels::SampleRow& base) {
  std::vector<float> logits = Random(vocab_size);
  for (float& logit : logits) logit *= 3;
  kernels::SampleResult result;
  kernels::SampleRow sample = base;
  const double seconds = Best([&] {
    ++sample.position;
    Check(kernels::cpu::SampleToken(logits, sample, {}, &result));
  });
  std::printf("sampler          %6d tokens %-10s %9.1f us\n", vocab_size, name, seconds * 1e6);
}

}  // namespace

int main() {
  kernels::cpu::ThreadPool pool(1);
  for (const int32_t length : {128, 1024, 2048}) Prefill(pool, length);
  Decode(pool, KvFormat::kFloat32, "float32 ", 1024, 1);
  Decode(pool, KvFormat::kBfloat16, "bfloat16", 1024, 1);
  Decode(pool, KvFormat::kFp8Latent, "fp8     ", 1024, 1);
  Decode(pool, KvFormat::kBfloat16, "bfloat16", 1024, 16);
  kernels::SampleRow greedy, plain, filtered, logprobs;
  greedy.temperature = 0;
  filtered.top_k = 50;
  filtered.top_p = 0.9f;
  logprobs.num_logprobs = 5;
  Sample("greedy", 129280, greedy);
  Sample("plain", 129280, plain);
  Sample("top-k/p", 129280, filtered);
  Sample("logprobs", 129280, logprobs);
}

// The rows of a step of DeepSeek-V2-Lite but for prefill attention, and dense decode as FlashMLA is
// measured.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/kernel_bench.h"

namespace bench {
namespace {

constexpr int64_t kHidden = 2048;
constexpr int32_t kHeads = 16;
constexpr int32_t kRank = 512;
constexpr int32_t kRope = 64;
constexpr int32_t kNope = 128;
constexpr int32_t kBlock = 64;  // tokens
constexpr int32_t kSplits = 16;
constexpr int64_t kExpert = 1408;
constexpr int64_t kVocab = 102400;

template <typename T>
T Check(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "cuda_kernels: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);
}

struct LinearCase {
  std::string name;
  int64_t out = 0;
  int64_t in = 0;
  bool norm = false;
  kernels::LinearEpilogue epilogue = kernels::LinearEpilogue::kNone;
  int32_t weights = 1;  // to rotate over
  double bar_us = 0;
};

void TimeLinear(KernelBench& bench, const LinearCase& c, int32_t rows) {
  const std::string name = absl::StrCat(c.name, " T=", rows);
  if (!bench.Wants(name)) return;
  kernels::Backend& backend = bench.backend();
  std::vector<std::unique_ptr<kernels::PackedLinear>> weights;
  for (int32_t i = 0; i < c.weights; ++i) {
    const kernels::WeightTensor tensor = bench.Weight(c.out, c.in);
    weights.push_back(Check(backend.PackLinear({&tensor, 1})));
  }
  const bool swiglu = c.epilogue == kernels::LinearEpilogue::kSwiGlu;
  const int64_t columns = swiglu ? c.out / 2 : c.out;
  float* x = bench.Floats(rows * c.in);
  float* norm = bench.Floats(c.in);
  float* y = bench.Floats(rows * columns);
  std::byte* workspace = bench.Bytes(backend.LinearWorkspaceBytes(rows, c.in));
  const kernels::OutputSegment output{.data = y, .row_stride = columns, .columns = columns};
  bench.Time({.name = name,
              .bytes = 2.0 * c.out * c.in + 4.0 * rows * (c.in + columns),
              .flops = 2.0 * rows * c.out * c.in,
              .bar_us = c.bar_us},
             c.weights, [&](const kernels::LaunchContext& context, int32_t i) {
               return backend.Linear(context, {.weight = weights[i].get(),
                                               .num_rows = rows,
                                               .input = {.data = x, .row_stride = c.in},
                                               .norm_weight = c.norm ? norm : nullptr,
                                               .epilogue = c.epilogue,
                                               .epilogue_residual = y,
                                               .outputs = {&output, 1},
                                               .workspace = workspace});
             });
  bench.Free();
}

// 16 heads of [out, in].
void TimeHeads(KernelBench& bench, const std::string& what, int64_t out, int64_t in, int32_t rows) {
  const std::string name = absl::StrCat(what, " T=", rows);
  if (!bench.Wants(name)) return;
  constexpr int32_t kWeights = 27;
  std::vector<std::unique_ptr<kernels::PackedHeadLinear>> weights;
  for (int32_t i = 0; i < kWeights; ++i) {
    weights.push_back(Check(bench.backend().PackHeadLinear(
        bench.Weight(kHeads * out, in),
        {.num_heads = kHeads, .head_rows = out, .row_begin = 0, .row_count = out})));
  }
  float* x = bench.Floats(rows * kHeads * in);
  float* y = bench.Floats(rows * kHeads * out);
  bench.Time({.name = name,
              .bytes = 2.0 * kHeads * out * in + 4.0 * rows * kHeads * (in + out),
              .flops = 2.0 * rows * kHeads * out * in},
             kWeights, [&](const kernels::LaunchContext& context, int32_t i) {
               return bench.backend().HeadLinear(context, {.weight = weights[i].get(),
                                                           .num_rows = rows,
                                                           .input = x,
                                                           .input_row_stride = kHeads * in,
                                                           .input_head_stride = in,
                                                           .output = y,
                                                           .output_row_stride = kHeads * out,
                                                           .output_head_stride = out});
             });
  bench.Free();
}

// Rope, store and absorption of rows that decode.
void TimePrepare(KernelBench& bench, int32_t rows) {
  const std::string name = absl::StrCat("rope, store, absorb T=", rows);
  if (!bench.Wants(name)) return;
  constexpr int32_t kWeights = 27;
  constexpr int64_t kHeadDim = kNope + kRope;
  constexpr int64_t kEntryDim = kRank + kRope;
  constexpr int32_t kPositions = 1024;
  std::vector<std::unique_ptr<kernels::PackedHeadLinear>> weights;
  for (int32_t i = 0; i < kWeights; ++i) {
    weights.push_back(Check(bench.backend().PackHeadLinear(
        bench.Weight(kHeads * kRank, kNope),
        {.num_heads = kHeads, .head_rows = kRank, .row_begin = 0, .row_count = kRank})));
  }
  std::vector<int32_t> positions(rows);
  std::vector<int64_t> slots(rows);
  for (int32_t i = 0; i < rows; ++i) {
    positions[i] = i * 7 % kPositions;
    slots[i] = i;
  }
  const kernels::RopeTable rope{.cos = bench.Floats(kPositions * kRope / 2),
                                .sin = bench.Floats(kPositions * kRope / 2),
                                .rope_dim = kRope,
                                .max_positions = kPositions};
  float* q = bench.Floats(rows * kHeads * kHeadDim);
  const int32_t blocks = (rows + kBlock - 1) / kBlock;
  const int32_t* device_positions = bench.Upload(positions);
  kernels::PrepareAttentionParams params{
      .rope = {.num_rows = rows,
               .num_heads = kHeads,
               .data = q + kNope,
               .row_stride = kHeads * kHeadDim,
               .head_stride = kHeadDim,
               .rope = rope,
               .positions = device_positions},
      .store = {.num_rows = rows,
                .kv_a = bench.Floats(rows * kEntryDim),
                .kv_a_row_stride = kEntryDim,
                .kv_lora_rank = kRank,
                .norm_weight = bench.Floats(kRank),
                .rope = rope,
                .positions = device_positions,
                .slots = bench.Upload(slots),
                .pages = {.base = bench.Bytes(blocks * kBlock * kEntryDim * 2),
                          .block_stride = kBlock * kEntryDim * 2,
                          .block_size = kBlock,
                          .entry_bytes = kEntryDim * 2,
                          .format = kernels::KvFormat::kBfloat16},
                .index_key = {}},
      .absorb = {.num_rows = rows,
                 .input = q,
                 .input_row_stride = kHeads * kHeadDim,
                 .input_head_stride = kHeadDim,
                 .output = bench.Floats(rows * kHeads * kRank),
                 .output_row_stride = kHeads * kRank,
                 .output_head_stride = kRank}};
  bench.Time({.name = name,
              .bytes = 2.0 * kHeads * kRank * kNope +
                       4.0 * rows * (kHeads * (kHeadDim + 2 * kRope + kRank) + 1.5 * kEntryDim),
              .flops = 2.0 * rows * kHeads * kRank * kNope},
             kWeights, [&](const kernels::LaunchContext& context, int32_t i) {
               params.absorb.weight = weights[i].get();
               return bench.backend().PrepareAttention(context, params);
             });
  bench.Free();
}

struct DecodeCase {
  int32_t batch = 1;
  int32_t heads = kHeads;
  int32_t keys = 1024;
  bool values = false;  // through W_UV
  double bar_us = 0;
  double peer_us = 0;
};

void TimeDecode(KernelBench& bench, const DecodeCase& c) {
  const std::string name =
      absl::StrCat("decode b=", c.batch, " h=", c.heads, " keys=", c.keys, c.values ? " W_UV" : "");
  if (!bench.Wants(name)) return;
  kernels::Backend& backend = bench.backend();
  const int64_t blocks_per_seq = (c.keys + kBlock - 1) / kBlock;
  const int64_t blocks = c.batch * blocks_per_seq;
  constexpr int64_t kEntryBytes = 2 * (kRank + kRope);
  const double key_bytes = static_cast<double>(c.batch) * c.keys * kEntryBytes;
  const int32_t rotations = std::clamp(static_cast<int32_t>(400e6 / key_bytes) + 1, 2, 400);
  auto* pages =
      reinterpret_cast<std::byte*>(bench.Bfloat16s(rotations * blocks * kBlock * kEntryBytes / 2));
  std::vector<int32_t> table(blocks), cu(c.batch + 1), lengths(c.batch, c.keys);
  for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(i * 7919 % blocks);
  for (int32_t i = 0; i <= c.batch; ++i) cu[i] = i;
  std::vector<kernels::DecodeSplit> splits;
  // As model::SplitTokens cuts them.
  const int32_t step = std::max(256, (c.keys + kSplits - 1) / kSplits + 63) / 64 * 64;
  for (int32_t seq = 0; seq < c.batch; ++seq) {
    for (int32_t begin = 0; begin < c.keys; begin += step) {
      splits.push_back({seq, begin, std::min(begin + step, c.keys)});
    }
  }
  const std::unique_ptr<kernels::PackedHeadLinear> w_uv = Check(backend.PackHeadLinear(
      bench.Weight(int64_t{c.heads} * kNope, kRank),
      {.num_heads = c.heads, .head_rows = kNope, .row_begin = 0, .row_count = kNope}));
  const int64_t columns = c.values ? kNope : kRank;
  kernels::AbsorbedDecodeParams params{
      .num_seqs = c.batch,
      .num_rows = c.batch,
      .max_q_len = 1,
      .num_heads = c.heads,
      .kv_lora_rank = kRank,
      .qk_rope_head_dim = kRope,
      .v_head_dim = c.values ? kNope : 0,
      .softmax_scale = 0.1f,
      .cu_seqlens_q = bench.Upload(cu),
      .kv_len = bench.Upload(lengths),
      .block_table = bench.Upload(table),
      .block_table_stride = blocks_per_seq,
      .splits = bench.Upload(splits),
      .num_splits = static_cast<int32_t>(splits.size()),
      .max_splits_per_seq = kSplits,
      .pages = {},
      .q_latent = bench.Floats(int64_t{c.batch} * c.heads * kRank),
      .q_latent_row_stride = c.heads * kRank,
      .q_latent_head_stride = kRank,
      .q_rope = bench.Floats(int64_t{c.batch} * c.heads * kRope),
      .q_rope_row_stride = c.heads * kRope,
      .q_rope_head_stride = kRope,
      .w_uv = c.values ? w_uv.get() : nullptr,
      .out = bench.Floats(c.batch * c.heads * columns),
      .out_row_stride = c.heads * columns,
      .out_head_stride = columns,
      .workspace = bench.Bytes(
          backend.attention().AbsorbedDecodeWorkspaceBytes(c.batch, kSplits, c.heads, kRank))};
  bench.Time({.name = name,
              .bytes = key_bytes + 2176.0 * c.batch * c.heads,
              .flops = 2.0 * c.batch * c.heads * c.keys * (2 * kRank + kRope),
              .bar_us = c.bar_us,
              .peer_us = c.peer_us},
             rotations, [&](const kernels::LaunchContext& context, int32_t i) {
               params.pages = {.base = pages + i * blocks * kBlock * kEntryBytes,
                               .block_stride = kBlock * kEntryBytes,
                               .block_size = kBlock,
                               .entry_bytes = kEntryBytes,
                               .format = kernels::KvFormat::kBfloat16};
               return backend.attention().AbsorbedDecode(context, params);
             });
  bench.Free();
}

void TimeMoe(KernelBench& bench, int32_t rows, double floor_bytes, double bar_us) {
  const std::string name = absl::StrCat("moe T=", rows);
  if (!bench.Wants(name)) return;
  kernels::Backend& backend = bench.backend();
  constexpr int32_t kExperts = 64, kTopK = 6;
  const auto expert = [&](int64_t size) {
    return kernels::ExpertTensors{.gate = bench.Weight(size, kHidden),
                                  .up = bench.Weight(size, kHidden),
                                  .down = bench.Weight(kHidden, size)};
  };
  std::vector<kernels::ExpertTensors> routed;
  for (int32_t i = 0; i < kExperts; ++i) routed.push_back(expert(kExpert));
  const kernels::ExpertTensors shared = expert(2 * kExpert);
  const std::unique_ptr<kernels::PackedExperts> experts =
      Check(backend.PackExperts(routed, {&shared, 1}));
  const kernels::WeightTensor gate_tensor = bench.Weight(kExperts, kHidden);
  const std::unique_ptr<kernels::PackedLinear> gate = Check(backend.PackLinear({&gate_tensor, 1}));
  // Every rotation has rows of its own, which choose experts of their own.
  constexpr int32_t kRotations = 16;
  const float* x = bench.Floats(int64_t{kRotations} * rows * kHidden);
  const kernels::MoeParams params{
      .num_rows = rows,
      .input_row_stride = kHidden,
      .norm_weight = bench.Floats(kHidden),
      .gate = {.method = kernels::GateMethod::kGreedy, .num_experts = kExperts, .top_k = kTopK},
      .gate_weight = gate.get(),
      .experts = experts.get(),
      .output = bench.Floats(rows * kHidden),
      .output_row_stride = kHidden,
      .workspace = bench.Bytes(backend.MoeWorkspaceBytes(
          rows, {.num_experts = kExperts, .top_k = kTopK}, kHidden, kExpert, 2 * kExpert))};
  bench.Time({.name = name,
              .bytes = floor_bytes,
              .flops = 2.0 * rows * 8 * 3 * kExpert * kHidden,
              .bar_us = bar_us},
             kRotations, [&](const kernels::LaunchContext& context, int32_t i) {
               kernels::MoeParams own = params;
               own.input = x + i * rows * kHidden;
               return backend.Moe(context, own);
             });
  bench.Free();
}

void TimeSampler(KernelBench& bench, const std::string& what, kernels::SampleRow sample,
                 int32_t rows) {
  const std::string name = absl::StrCat("head and ", what, " T=", rows);
  if (!bench.Wants(name)) return;
  kernels::Backend& backend = bench.backend();
  const kernels::WeightTensor tensor = bench.Weight(kVocab, kHidden);
  const std::unique_ptr<kernels::PackedLinear> head = Check(backend.PackLinear({&tensor, 1}));
  std::vector<kernels::SampleRow> samples(rows);
  for (int32_t i = 0; i < rows; ++i) {
    samples[i] = sample;
    samples[i].row = i;
    samples[i].seed = static_cast<uint64_t>(i);
  }
  const kernels::HeadAndSampleParams params{
      .hidden = bench.Floats(rows * kHidden),
      .hidden_row_stride = kHidden,
      .vocab_size = kVocab,
      .norm_weight = bench.Floats(kHidden),
      .head = head.get(),
      .samples = bench.Upload(samples),
      .num_samples = rows,
      .penalties = {},
      .results = bench.Upload(std::vector<kernels::SampleResult>(rows)),
      .sampled_ids = bench.Upload(std::vector<int32_t>(rows)),
      .workspace = bench.Bytes(backend.HeadAndSampleWorkspaceBytes(rows, kHidden, kVocab))};
  bench.Time(
      {.name = name, .bytes = 2.0 * kVocab * kHidden, .flops = 2.0 * rows * kVocab * kHidden}, 2,
      [&](const kernels::LaunchContext& context, int32_t) {
        return backend.HeadAndSample(context, params);
      });
  bench.Free();
}

}  // namespace

void TimeDecode(KernelBench& bench) {
  bench.Group("products of a decode step");
  using kernels::LinearEpilogue;
  const LinearCase q_kv_a{"q_kv_a", 3648, kHidden, true, LinearEpilogue::kNone, 27};
  const LinearCase o{"o", kHidden, kHidden, false, LinearEpilogue::kResidual, 48};
  const LinearCase dense_up{"dense gate_up", 2 * 10944, kHidden, true, LinearEpilogue::kSwiGlu, 4};
  const LinearCase dense_down{"dense down", kHidden, 10944, false, LinearEpilogue::kResidual, 8};
  const LinearCase lm_head{"lm_head",
                           kVocab,
                           kHidden,
                           true,
                           LinearEpilogue::kNone,
                           1,
                           2.0 * kVocab * kHidden / (0.9 * 4.283e6)};
  for (const int32_t rows : {1, 100}) {
    for (const LinearCase& c : {q_kv_a, o, dense_up, dense_down, lm_head}) {
      TimeLinear(bench, c, rows);
    }
    TimeHeads(bench, "absorb", kRank, kNope, rows);
    TimeHeads(bench, "W_UV", kNope, kRank, rows);
    TimePrepare(bench, rows);
    TimeSampler(bench, "greedy", {.temperature = 0}, rows);
    TimeSampler(bench, "top-p", {.temperature = 0.8f, .top_p = 0.9f}, rows);
  }
  bench.Group("products of a prefill step");
  const LinearCase kv_b{"kv_b", 4096, kRank, false, LinearEpilogue::kNone, 64};
  for (const LinearCase& c : {q_kv_a, kv_b, o, dense_up, dense_down}) TimeLinear(bench, c, 1000);
  TimeLinear(bench, {"square", 4096, 4096, false, LinearEpilogue::kNone, 8}, 4096);
  bench.Group("mixture of experts, V2-Lite");
  constexpr double kExpertBytes = 6.0 * kExpert * kHidden;
  TimeMoe(bench, 1, 8 * kExpertBytes, 42);
  TimeMoe(bench, 8, 37 * kExpertBytes, 0);
  TimeMoe(bench, 100, 66 * kExpertBytes, 320);
  TimeMoe(bench, 1000, 66 * kExpertBytes, 400);
  TimeMoe(bench, 4096, 66 * kExpertBytes, 0);
  bench.Group("dense absorbed decode (peer: FlashMLA, without its metadata)");
  for (const DecodeCase& c :
       {DecodeCase{1, 16, 1024, false, 11, 11.39}, DecodeCase{1, 16, 1024, true},
        DecodeCase{1, 16, 16384, false, 0, 39.32}, DecodeCase{16, 16, 4096, false, 0, 29.23},
        DecodeCase{100, 16, 1050, true}, DecodeCase{128, 16, 4096, false, 155, 152.41},
        DecodeCase{128, 128, 4096, false, 0, 265.97}}) {
    TimeDecode(bench, c);
  }
}

}  // namespace bench

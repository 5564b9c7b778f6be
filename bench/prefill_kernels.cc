// Ragged prefill attention from the output of kv_b on: queries in float32, keys and values in the
// dtype that suits the backend.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/kernel_bench.h"

namespace bench {
namespace {

constexpr int32_t kNope = 128;
constexpr int32_t kRope = 64;
constexpr int32_t kValue = 128;

struct PrefillCase {
  std::string name;
  std::vector<int32_t> lengths;
  int32_t heads = 16;
  double bar_us = 0;
  double peer_us = 0;
};

void TimeRaggedMha(KernelBench& bench, const PrefillCase& c) {
  const std::string name = absl::StrCat("prefill ", c.name, " h=", c.heads);
  if (!bench.Wants(name)) return;
  kernels::AttentionBackend& attention = bench.backend().attention();
  std::vector<int32_t> cu = {0};
  double pairs = 0;  // of a query and a key that it sees
  for (const int32_t length : c.lengths) {
    cu.push_back(cu.back() + length);
    pairs += 0.5 * length * length;
  }
  const int64_t tokens = cu.back();
  const bool rounded = attention.ragged_kv_dtype() == kernels::DType::kBfloat16;
  const auto values = [&](int64_t count) {
    return rounded ? static_cast<void*>(bench.Bfloat16s(count)) : bench.Floats(count);
  };
  const int64_t q_stride = c.heads * (kNope + kRope), kv_stride = c.heads * (kNope + kValue);
  const int64_t outputs = tokens * c.heads * kValue;
  const float* q = bench.Floats(tokens * q_stride);
  auto* kv = static_cast<std::byte*>(values(tokens * kv_stride));
  const int32_t* lengths = bench.Upload(cu);
  const kernels::RaggedMhaParams params{.num_seqs = static_cast<int32_t>(c.lengths.size()),
                                        .num_rows = static_cast<int32_t>(tokens),
                                        .num_heads = c.heads,
                                        .qk_nope_head_dim = kNope,
                                        .qk_rope_head_dim = kRope,
                                        .v_head_dim = kValue,
                                        .softmax_scale = 0.0722f,
                                        .cu_seqlens_q = lengths,
                                        .cu_seqlens_kv = lengths,
                                        .q_nope = q,
                                        .q_nope_row_stride = q_stride,
                                        .q_nope_head_stride = kNope + kRope,
                                        .q_rope = q + kNope,
                                        .q_rope_row_stride = q_stride,
                                        .q_rope_head_stride = kNope + kRope,
                                        .kv_dtype = attention.ragged_kv_dtype(),
                                        .num_keys = static_cast<int32_t>(tokens),
                                        .k_nope = kv,
                                        .k_nope_row_stride = kv_stride,
                                        .k_nope_head_stride = kNope + kValue,
                                        .k_rope = values(tokens * kRope),
                                        .k_rope_row_stride = kRope,
                                        .v = kv + kNope * (rounded ? 2 : 4),
                                        .v_row_stride = kv_stride,
                                        .v_head_stride = kNope + kValue,
                                        .out = rounded ? nullptr : bench.Floats(outputs),
                                        .rounded_out = rounded ? bench.Bfloat16s(outputs) : nullptr,
                                        .out_row_stride = c.heads * kValue,
                                        .out_head_stride = kValue};
  bench.Time({.name = name,
              .bytes = 4.0 * tokens * c.heads * (kNope + kRope + kValue) +
                       2.0 * tokens * (kv_stride + kRope),
              .flops = 2.0 * pairs * c.heads * (kNope + kRope + kValue),
              .bar_us = c.bar_us,
              .peer_us = c.peer_us},
             4, [&](const kernels::LaunchContext& context, int32_t) {
               return attention.RaggedMha(context, params);
             });
  bench.Free();
}

}  // namespace

void TimePrefill(KernelBench& bench) {
  bench.Group(
      "ragged prefill attention, causal (peer: FlashAttention-3, which needs K concatenated)");
  TimeRaggedMha(bench, {"1x1000", {1000}});
  TimeRaggedMha(bench, {"16x1024", std::vector<int32_t>(16, 1024), 16, 215, 215.5});
  TimeRaggedMha(bench, {"1x8192", {8192}, 16, 600, 532.8});
  TimeRaggedMha(bench, {"1x8192", {8192}, 128, 0, 4188.8});
  // As many tokens and, within a percent, products as the peers' mixed batch.
  TimeRaggedMha(bench, {"mixed 13",
                        {1, 77, 8192, 128, 64, 7096, 300, 8192, 200, 3000, 100, 126, 8192},
                        16,
                        2400,
                        2198.2});
}

}  // namespace bench

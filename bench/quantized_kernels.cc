// The products of DeepSeek-V3.2 (fp8) and V4-Flash (fp8, experts fp4) at their real sizes.

#include <algorithm>
#include <cmath>
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
};

void TimeLinear(KernelBench& bench, const LinearCase& c, kernels::DType scale_dtype,
                absl::Span<const int32_t> row_counts) {
  const auto name = [&](int32_t rows) { return absl::StrCat(c.name, " T=", rows); };
  if (std::none_of(row_counts.begin(), row_counts.end(),
                   [&](int32_t rows) { return bench.Wants(name(rows)); })) {
    return;
  }
  kernels::Backend& backend = bench.backend();
  // More than the second-level cache holds.
  const auto rotations = static_cast<int32_t>((int64_t{200} << 20) / (c.out * c.in) + 1);
  std::vector<std::unique_ptr<kernels::PackedLinear>> weights;
  for (int32_t i = 0; i < rotations; ++i) {
    const kernels::WeightTensor tensor = bench.Float8Weight(c.out, c.in, scale_dtype);
    weights.push_back(Check(backend.PackLinear({&tensor, 1})));
  }
  const bool swiglu = c.epilogue == kernels::LinearEpilogue::kSwiGlu;
  const int64_t columns = swiglu ? c.out / 2 : c.out;
  for (const int32_t rows : row_counts) {
    if (!bench.Wants(name(rows))) continue;
    float* x = bench.Floats(rows * c.in);
    float* norm = bench.Floats(c.in);
    float* y = bench.Floats(rows * columns);
    std::byte* workspace = bench.Bytes(backend.LinearWorkspaceBytes(rows, c.in));
    const kernels::OutputSegment output{.data = y, .row_stride = columns, .columns = columns};
    bench.Time({.name = name(rows),
                .bytes = 1.0 * c.out * c.in + 4.0 * rows * (c.in + columns),
                .flops = 2.0 * rows * c.out * c.in},
               rotations, [&](const kernels::LaunchContext& context, int32_t i) {
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
}

struct MoeCase {
  std::string name;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of routed experts and of the shared one
  bool float4 = false;       // routed experts
  kernels::GateConfig gate;
};

void TimeMoe(KernelBench& bench, const MoeCase& c, absl::Span<const int32_t> row_counts) {
  const auto name = [&](int32_t rows) { return absl::StrCat(c.name, " T=", rows); };
  if (std::none_of(row_counts.begin(), row_counts.end(),
                   [&](int32_t rows) { return bench.Wants(name(rows)); })) {
    return;
  }
  kernels::Backend& backend = bench.backend();
  const auto expert = [&](bool float4) {
    const auto weight = [&](int64_t rows, int64_t cols) {
      return float4 ? bench.Float4Weight(rows, cols)
                    : bench.Float8Weight(
                          rows, cols,
                          c.float4 ? kernels::DType::kFloat8E8m0 : kernels::DType::kFloat32);
    };
    return kernels::ExpertTensors{.gate = weight(c.intermediate, c.hidden),
                                  .up = weight(c.intermediate, c.hidden),
                                  .down = weight(c.hidden, c.intermediate)};
  };
  std::vector<kernels::ExpertTensors> routed;
  for (int32_t i = 0; i < c.gate.num_experts; ++i) routed.push_back(expert(c.float4));
  const kernels::ExpertTensors shared = expert(false);
  const auto experts = Check(backend.PackExperts(routed, {&shared, 1}));
  const kernels::WeightTensor gate_tensor = bench.Weight(c.gate.num_experts, c.hidden);
  const auto gate = Check(backend.PackLinear({&gate_tensor, 1}));
  for (const int32_t rows : row_counts) {
    if (!bench.Wants(name(rows))) continue;
    // Every rotation has rows of its own, which choose experts of their own.
    const int32_t rotations = rows <= 8 ? 8 : rows <= 128 ? 4 : 1;
    const float* x = bench.Floats(int64_t{rotations} * rows * c.hidden);
    const kernels::MoeParams params{.num_rows = rows,
                                    .input_row_stride = c.hidden,
                                    .norm_weight = bench.Floats(c.hidden),
                                    .gate = c.gate,
                                    .gate_weight = gate.get(),
                                    .experts = experts.get(),
                                    .output = bench.Floats(rows * c.hidden),
                                    .output_row_stride = c.hidden,
                                    .workspace = bench.Bytes(backend.MoeWorkspaceBytes(
                                        rows, c.gate, c.hidden, c.intermediate, c.intermediate))};
    // Experts that rows are expected to choose, each by itself.
    const double n = c.gate.num_experts;
    const double chosen = n * (1 - std::pow(1 - c.gate.top_k / n, rows));
    const double weights = 3.0 * c.intermediate * c.hidden;
    bench.Time({.name = name(rows),
                .bytes = weights * (chosen * (c.float4 ? 0.53125 : 1) + 1),
                .flops = 2.0 * rows * weights * (c.gate.top_k + 1)},
               rotations, [&](const kernels::LaunchContext& context, int32_t i) {
                 kernels::MoeParams own = params;
                 own.input = x + i * rows * c.hidden;
                 return backend.Moe(context, own);
               });
  }
  bench.Free();
}

}  // namespace

void TimeQuantized(KernelBench& bench) {
  using kernels::LinearEpilogue;
  constexpr int32_t kRows[] = {1, 8, 32, 128, 4096};
  bench.Group("fp8 products, V3.2");
  for (const LinearCase& c :
       {LinearCase{"v32 q_a | kv_a", 2112, 7168, true}, LinearCase{"v32 q_b", 24576, 1536, true},
        LinearCase{"v32 o", 7168, 16384, false, LinearEpilogue::kResidual},
        LinearCase{"v32 dense up", 36864, 7168, true, LinearEpilogue::kSwiGlu},
        LinearCase{"v32 dense down", 7168, 18432, false, LinearEpilogue::kResidual}}) {
    TimeLinear(bench, c, kernels::DType::kFloat32, kRows);
  }
  bench.Group("fp8 products, V4-Flash");
  for (const LinearCase& c :
       {LinearCase{"v4 q_a | kv", 1536, 4096, true}, LinearCase{"v4 q_b", 32768, 1024, true},
        LinearCase{"v4 o_b", 4096, 8192}}) {
    TimeLinear(bench, c, kernels::DType::kFloat8E8m0, kRows);
  }
  bench.Group("mixture of experts, V3.2 (fp8) and V4-Flash (fp4, the shared one fp8)");
  TimeMoe(bench,
          {.name = "v32 moe",
           .hidden = 7168,
           .intermediate = 2048,
           .gate = {.method = kernels::GateMethod::kNoAuxTc,
                    .num_experts = 256,
                    .top_k = 8,
                    .num_groups = 8,
                    .top_k_groups = 4,
                    .norm_topk_prob = true,
                    .routed_scaling_factor = 2.5f}},
          kRows);
  TimeMoe(bench,
          {.name = "v4 moe",
           .hidden = 4096,
           .intermediate = 2048,
           .float4 = true,
           .gate = {.method = kernels::GateMethod::kSqrtSoftplus,
                    .num_experts = 256,
                    .top_k = 6,
                    .norm_topk_prob = true,
                    .routed_scaling_factor = 1.5f}},
          kRows);
}

}  // namespace bench

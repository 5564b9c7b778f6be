#include "kernels/cpu/moe.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/gate.h"
#include "kernels/cpu/linear.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr float kMarker = 1234.5f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct ExpertWeights {
  TestWeight gate, up, down;
  ExpertTensors tensors() const { return {gate.tensor, up.tensor, down.tensor}; }
};

ExpertWeights MakeExpert(const WeightKind& kind, int64_t hidden, int64_t intermediate,
                         uint32_t seed) {
  return {MakeWeight(kind, intermediate, hidden, seed),
          MakeWeight(kind, intermediate, hidden, seed + 1),
          MakeWeight(kind, hidden, intermediate, seed + 2)};
}

// A layer with its packed and its plain weights.
struct Layer {
  Layer(ThreadPool& pool, const MatrixKernels& kernels, const WeightKind& kind,
        const GateConfig& gate, int64_t hidden, int64_t intermediate,
        const std::vector<int64_t>& shared_intermediate)
      : gate(gate), hidden(hidden) {
    uint32_t seed = 100;
    gate_weight = MakeWeight({"", DType::kBfloat16}, gate.num_experts, hidden, seed);
    bias = RandomFloats(gate.num_experts, seed);
    norm = RandomFloats(hidden, seed + 1);
    std::vector<ExpertTensors> routed_tensors, shared_tensors;
    for (int32_t e = 0; e < gate.num_experts; ++e) {
      routed.push_back(MakeExpert(kind, hidden, intermediate, seed += 3));
      routed_tensors.push_back(routed.back().tensors());
    }
    for (const int64_t size : shared_intermediate) {
      shared.push_back(MakeExpert(kind, hidden, size, seed += 3));
      shared_tensors.push_back(shared.back().tensors());
    }
    packed_gate = PackLinear(pool, {gate_weight.tensor}, kernels).value();
    packed = PackExperts(pool, routed_tensors, shared_tensors, kernels).value();
  }

  MoeParams Params(const float* input, int32_t num_rows, float* output) const {
    return {.num_rows = num_rows,
            .input = input,
            .input_row_stride = hidden,
            .norm_weight = norm.data(),
            .norm_eps = 1e-6f,
            .gate = gate,
            .gate_weight = packed_gate.get(),
            .gate_bias = bias.data(),
            .experts = packed.get(),
            .swiglu_limit = swiglu_limit,
            .residual = residual,
            .output = output,
            .output_row_stride = hidden};
  }

  GateConfig gate;
  int64_t hidden;
  float swiglu_limit = 0;
  bool residual = true;
  std::vector<int32_t> table;  // [tokens, top_k]; empty: none
  TestWeight gate_weight;
  std::vector<float> bias, norm;
  std::vector<ExpertWeights> routed, shared;
  std::unique_ptr<PackedLinear> packed_gate;
  std::unique_ptr<PackedExperts> packed;
};

std::vector<double> MultiplyRow(const TestWeight& weight, const std::vector<double>& row) {
  std::vector<double> out;
  for (int64_t n = 0; n < weight.tensor.rows; ++n) {
    double sum = 0;
    for (int64_t k = 0; k < weight.tensor.cols; ++k) {
      sum += weight.at(n, k) * row[static_cast<size_t>(k)];
    }
    out.push_back(sum);
  }
  return out;
}

// limit 0: no clamp.
std::vector<double> RunExpert(const ExpertWeights& expert, const std::vector<double>& row,
                              double limit) {
  std::vector<double> gate = MultiplyRow(expert.gate, row);
  std::vector<double> up = MultiplyRow(expert.up, row);
  for (size_t i = 0; i < gate.size(); ++i) {
    if (limit > 0) gate[i] = std::min(gate[i], limit), up[i] = std::clamp(up[i], -limit, limit);
    gate[i] = Silu(gate[i]) * up[i];
  }
  return MultiplyRow(expert.down, gate);
}

// The block in double.  Which experts: gate_test's business, so the selection's own code decides.
// `token`: of a layer with a table.
std::vector<double> Reference(const Layer& layer, const float* input, std::vector<int32_t>* ids,
                              std::vector<float>* weights, int32_t token = 0) {
  const std::vector<double> x(input, input + layer.hidden);
  const std::vector<double> normed = RmsNormReference(x, layer.norm, 1e-6);
  const std::vector<double> scores = MultiplyRow(layer.gate_weight, normed);
  const std::vector<float> logits(scores.begin(), scores.end());
  ids->resize(static_cast<size_t>(layer.gate.top_k));
  weights->resize(static_cast<size_t>(layer.gate.top_k));
  if (layer.table.empty()) {
    SelectExperts(layer.gate, logits.data(), layer.bias.data(), ids->data(), weights->data());
  } else {
    WeighExperts(layer.gate, logits.data(),
                 &layer.table[static_cast<size_t>(token * layer.gate.top_k)], ids->data(),
                 weights->data());
  }
  std::vector<double> out = layer.residual ? x : std::vector<double>(x.size());
  const auto add = [&](const ExpertWeights& expert, double weight) {
    const std::vector<double> y = RunExpert(expert, normed, layer.swiglu_limit);
    for (size_t i = 0; i < out.size(); ++i) out[i] += weight * y[i];
  };
  for (size_t i = 0; i < ids->size(); ++i) {
    add(layer.routed[static_cast<size_t>((*ids)[i])], (*weights)[i]);
  }
  for (const ExpertWeights& expert : layer.shared) add(expert, 1);
  return out;
}

std::vector<GateConfig> AllGates() {
  return {{.method = GateMethod::kGreedy, .num_experts = 9, .top_k = 3},
          {.method = GateMethod::kGroupLimitedGreedy,
           .num_experts = 8,
           .top_k = 3,
           .num_groups = 4,
           .top_k_groups = 2,
           .routed_scaling_factor = 16},
          {.method = GateMethod::kNoAuxTc,
           .num_experts = 8,
           .top_k = 4,
           .num_groups = 2,
           .top_k_groups = 1,
           .norm_topk_prob = true,
           .routed_scaling_factor = 2.5f},
          {.method = GateMethod::kSqrtSoftplus,
           .num_experts = 9,
           .top_k = 4,
           .norm_topk_prob = true,
           .routed_scaling_factor = 1.5f}};
}

class MoeTest : public ::testing::TestWithParam<const MatrixKernels*> {
 protected:
  ThreadPool pool_{3};
};

TEST_P(MoeTest, EqualsTheDoubleBlock) {
  for (const GateConfig& gate : AllGates()) {
    for (const WeightKind& kind : AllWeightKinds()) {
      const Layer layer(pool_, *GetParam(), kind, gate, kind.Columns(45), kind.Columns(37),
                        {50, kind.Columns(33)});
      for (const int32_t rows : {1, 2, 17}) {
        const std::vector<float> input = RandomFloats(rows * layer.hidden, 7);
        std::vector<float> out(input.size()), weights(static_cast<size_t>(rows * gate.top_k));
        std::vector<int32_t> ids(weights.size());
        MoeParams params = layer.Params(input.data(), rows, out.data());
        params.topk_ids = ids.data();
        params.topk_weights = weights.data();
        const absl::Status status = Moe(pool_, params);
        ASSERT_TRUE(status.ok()) << status;
        for (int32_t r = 0; r < rows; ++r) {
          std::vector<int32_t> row_ids;
          std::vector<float> row_weights;
          const std::vector<double> expected =
              Reference(layer, input.data() + r * layer.hidden, &row_ids, &row_weights);
          EXPECT_EQ(row_ids, std::vector<int32_t>(ids.begin() + r * gate.top_k,
                                                  ids.begin() + (r + 1) * gate.top_k));
          EXPECT_TRUE(numerics::AllClose(
              absl::MakeConstSpan(weights).subspan(static_cast<size_t>(r * gate.top_k),
                                                   static_cast<size_t>(gate.top_k)),
              absl::MakeConstSpan(row_weights), {.rel = 2e-5}));
          // Three products in a row lose about their length in roundings of the row's largest
          // value.
          double largest = 0;
          for (const double value : expected) largest = std::max(largest, std::abs(value));
          EXPECT_TRUE(numerics::AllClose(
              absl::MakeConstSpan(out).subspan(static_cast<size_t>(r * layer.hidden),
                                               static_cast<size_t>(layer.hidden)),
              absl::MakeConstSpan(expected), {.abs = 2e-5 * largest, .cosine = 1e-10}))
              << kind.name << " row " << r << " of " << rows;
        }
      }
    }
  }
}

// models.md 7.8: experts by token id, a clamp that bites, no residual.
TEST_P(MoeTest, LooksUpExpertsAndClamps) {
  Layer layer(pool_, *GetParam(), {"", DType::kBfloat16}, AllGates()[3], 45, 37, {33});
  layer.swiglu_limit = 0.4f;
  layer.residual = false;
  layer.table = {3, 0, 8, 5, 1, 2, 3, 4, 8, 7, 6, 5};
  const std::vector<int32_t> tokens = {2, 0, 1, 1, 3, -1};  // the last two: as token 0
  const auto rows = static_cast<int32_t>(tokens.size());
  const std::vector<float> input = RandomFloats(rows * layer.hidden, 7);
  std::vector<float> out(input.size(), kMarker);
  std::vector<int32_t> ids(tokens.size() * 4);
  MoeParams params = layer.Params(input.data(), rows, out.data());
  params.expert_table = layer.table.data();
  params.vocab_size = 3;
  params.token_ids = tokens.data();
  params.topk_ids = ids.data();
  const absl::Status status = Moe(pool_, params);
  ASSERT_TRUE(status.ok()) << status;
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t token = tokens[static_cast<size_t>(r)];
    std::vector<int32_t> row_ids;
    std::vector<float> row_weights;
    const std::vector<double> expected =
        Reference(layer, input.data() + r * layer.hidden, &row_ids, &row_weights,
                  token < 0 || token > 2 ? 0 : token);
    EXPECT_EQ(row_ids, std::vector<int32_t>(ids.begin() + r * 4, ids.begin() + (r + 1) * 4));
    EXPECT_TRUE(
        numerics::AllClose(absl::MakeConstSpan(out).subspan(static_cast<size_t>(r * layer.hidden),
                                                            static_cast<size_t>(layer.hidden)),
                           absl::MakeConstSpan(expected), {.abs = 2e-5, .cosine = 1e-10}));
    layer.swiglu_limit = 0;
    EXPECT_FALSE(numerics::AllClose(
        absl::MakeConstSpan(out).subspan(static_cast<size_t>(r * layer.hidden),
                                         static_cast<size_t>(layer.hidden)),
        absl::MakeConstSpan(Reference(layer, input.data() + r * layer.hidden, &row_ids,
                                      &row_weights, token < 0 || token > 2 ? 0 : token)),
        {.abs = 1e-2}));
    layer.swiglu_limit = 0.4f;
  }
}

TEST_P(MoeTest, ARowHasTheSameBitsInEveryBatchAndOnAnyNumberOfThreads) {
  constexpr int32_t kMaxRows = 40;
  ThreadPool one(1);
  for (const WeightKind& kind : AllWeightKinds()) {
    const Layer layer(pool_, *GetParam(), kind, AllGates()[2], 70, kind.Columns(41), {64});
    const std::vector<float> input = RandomFloats(kMaxRows * layer.hidden, 7);
    std::vector<float> alone(input.size());
    for (int32_t r = 0; r < kMaxRows; ++r) {
      ASSERT_TRUE(Moe(one, layer.Params(input.data() + r * layer.hidden, 1,
                                        alone.data() + r * layer.hidden))
                      .ok());
    }
    for (int32_t rows = 1; rows <= kMaxRows; ++rows) {
      std::vector<float> out(static_cast<size_t>(rows * layer.hidden));
      ASSERT_TRUE(Moe(pool_, layer.Params(input.data(), rows, out.data())).ok());
      ASSERT_TRUE(numerics::BitEqual(out, absl::MakeConstSpan(alone).subspan(0, out.size())))
          << kind.name << " " << rows << " rows";
    }
  }
}

TEST_P(MoeTest, MoreRowsThanABlockAndInPlace) {
  constexpr int32_t kRows = 700;
  const Layer layer(pool_, *GetParam(), {"", DType::kBfloat16}, AllGates()[0], 33, 16, {32});
  const std::vector<float> input = RandomFloats(kRows * layer.hidden, 7);
  std::vector<float> in_place = input;
  std::vector<int32_t> ids(kRows * 3);
  MoeParams params = layer.Params(in_place.data(), kRows, in_place.data());
  params.topk_ids = ids.data();
  ASSERT_TRUE(Moe(pool_, params).ok());
  for (const int32_t r : {0, 511, 512, 699}) {
    std::vector<float> row(static_cast<size_t>(layer.hidden));
    std::vector<int32_t> row_ids(3);
    MoeParams alone = layer.Params(input.data() + r * layer.hidden, 1, row.data());
    alone.topk_ids = row_ids.data();
    ASSERT_TRUE(Moe(pool_, alone).ok());
    EXPECT_TRUE(numerics::BitEqual(row, absl::MakeConstSpan(in_place).subspan(
                                            static_cast<size_t>(r * layer.hidden), row.size())));
    EXPECT_EQ(row_ids, std::vector<int32_t>(ids.begin() + r * 3, ids.begin() + r * 3 + 3));
  }
}

TEST_P(MoeTest, PaddingIsNeitherReadNorWritten) {
  const Layer layer(pool_, *GetParam(), {"", DType::kBfloat16}, AllGates()[1], 45, 37, {});
  constexpr int32_t kRows = 7;
  constexpr int64_t kStride = 52;
  const std::vector<float> values = RandomFloats(kRows * layer.hidden, 7);
  std::vector<float> input((kRows + 1) * kStride, kNan), out((kRows + 1) * kStride, kMarker);
  std::vector<float> expected(values.size());
  ASSERT_TRUE(Moe(pool_, layer.Params(values.data(), kRows, expected.data())).ok());
  for (int64_t r = 0; r < kRows; ++r) {
    std::copy_n(values.begin() + r * layer.hidden, layer.hidden, input.begin() + r * kStride);
  }
  MoeParams params = layer.Params(input.data(), kRows, out.data());
  params.input_row_stride = params.output_row_stride = kStride;
  ASSERT_TRUE(Moe(pool_, params).ok());
  for (int64_t r = 0; r <= kRows; ++r) {
    for (int64_t c = 0; c < kStride; ++c) {
      const bool inside = r < kRows && c < layer.hidden;
      ASSERT_EQ(out[static_cast<size_t>(r * kStride + c)],
                inside ? expected[static_cast<size_t>(r * layer.hidden + c)] : kMarker);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MoeTest,
                         ::testing::Values(&GenericMatrixKernels(), &BestMatrixKernels()),
                         [](const auto& info) {
                           return std::to_string(info.index) + "_" + info.param->name;
                         });

TEST(MoeErrorTest, NamesWhatDoesNotFit) {
  ThreadPool pool(1);
  const GateConfig gate = {.num_experts = 3, .top_k = 1};
  const WeightKind kind = {"", DType::kBfloat16};
  const auto message = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const ExpertWeights good = MakeExpert(kind, 8, 4, 1), wide = MakeExpert(kind, 8, 6, 2);
  EXPECT_THAT(message(PackExperts(pool, {}, {}).status()), HasSubstr("no routed expert"));
  EXPECT_THAT(message(PackExperts(pool, {good.tensors(), wide.tensors()}, {}).status()),
              HasSubstr("routed expert 1 is [6, 8], routed expert 0 is [4, 8]"));
  ExpertTensors mixed = good.tensors();
  mixed.down = wide.down.tensor;
  EXPECT_THAT(message(PackExperts(pool, {mixed}, {}).status()), HasSubstr("down [8, 6]"));
  mixed = good.tensors();
  mixed.up.dtype = DType::kInt32;
  EXPECT_THAT(message(PackExperts(pool, {mixed}, {}).status()), HasSubstr("dtype int32"));

  const Layer layer(pool, GenericMatrixKernels(), kind, gate, 8, 4, {});
  std::vector<float> input(16), out(16);
  MoeParams params = layer.Params(input.data(), 2, out.data());
  params.gate.num_experts = 4;
  EXPECT_THAT(message(Moe(pool, params)),
              HasSubstr("gate over 4 experts with weight [3, 8] for 3"));
  params = layer.Params(input.data(), 2, out.data());
  params.gate.top_k = 4;
  EXPECT_THAT(message(Moe(pool, params)), HasSubstr("4 of 3 experts"));
  params = layer.Params(input.data(), 2, out.data());
  const int32_t table[3] = {0, 1, 2};
  params.expert_table = table;
  params.vocab_size = 3;
  EXPECT_THAT(message(Moe(pool, params)), HasSubstr("expert table of 3 tokens without token ids"));
  params = layer.Params(input.data(), 2, out.data());
  params.output_row_stride = 7;
  EXPECT_THAT(message(Moe(pool, params)), HasSubstr("7 (output) < hidden size 8"));
}

}  // namespace
}  // namespace kernels::cpu

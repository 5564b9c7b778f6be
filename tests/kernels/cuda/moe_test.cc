#include "kernels/moe.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::HasSubstr;

// A layer's weights in host memory; experts with the same seed for the same layer.
struct Layer {
  Layer(const GateConfig& gate, int64_t hidden, int64_t intermediate,
        const std::vector<int64_t>& shared_sizes, const WeightKind& kind)
      : Layer(gate, hidden, intermediate, shared_sizes, kind, kind) {}
  Layer(const GateConfig& gate, int64_t hidden, int64_t intermediate,
        const std::vector<int64_t>& shared_sizes, const WeightKind& kind,
        const WeightKind& shared_kind)
      : gate(gate), hidden(hidden), intermediate(intermediate) {
    uint32_t seed = 1;
    const auto add = [&](const WeightKind& kind, int64_t size, std::vector<ExpertTensors>& to) {
      for (const auto& [rows, cols] :
           {std::pair{size, hidden}, std::pair{size, hidden}, std::pair{hidden, size}}) {
        weights.push_back(std::make_unique<TestWeight>(MakeWeight(kind, rows, cols, seed++)));
      }
      const size_t n = weights.size();
      to.push_back({weights[n - 3]->tensor, weights[n - 2]->tensor, weights[n - 1]->tensor});
    };
    for (int32_t e = 0; e < gate.num_experts; ++e) add(kind, intermediate, routed);
    for (const int64_t size : shared_sizes) {
      add(shared_kind, size, shared);
      shared_intermediate += size;
    }
    gate_weight = MakeWeight({"", DType::kBfloat16}, gate.num_experts, hidden, 900);
    bias = RandomFloats(gate.num_experts, 901);
    norm_weight = RandomFloats(hidden, 902);
    for (float& weight : norm_weight) weight *= 0.05f;
  }

  GateConfig gate;
  int64_t hidden, intermediate, shared_intermediate = 0;
  std::vector<std::unique_ptr<TestWeight>> weights;
  std::vector<ExpertTensors> routed, shared;
  TestWeight gate_weight;
  std::vector<float> bias, norm_weight;
};

struct Result {
  std::vector<float> out;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class CudaMoeTest : public DeviceTest {
 protected:
  using DeviceTest::DeviceTest;

  Result RunOnHost(const Layer& layer, const std::vector<float>& input, int32_t num_rows) {
    Result result = Empty(layer, num_rows);
    const auto experts = host_->PackExperts(layer.routed, layer.shared);
    const auto gate = host_->PackLinear({layer.gate_weight.tensor});
    MoeParams params = Params(layer, num_rows);
    params.input = input.data();
    params.norm_weight = layer.norm_weight.data();
    params.gate_weight = gate->get();
    params.gate_bias = layer.bias.data();
    params.experts = experts->get();
    params.output = result.out.data();
    params.topk_ids = result.ids.data();
    params.topk_weights = result.weights.data();
    EXPECT_TRUE(host_->Moe({}, params).ok());
    return result;
  }
  Result RunOnDevice(const Layer& layer, const std::vector<float>& input, int32_t num_rows) {
    const Result empty = Empty(layer, num_rows);
    const auto experts = device_->PackExperts(layer.routed, layer.shared);
    EXPECT_TRUE(experts.ok()) << experts.status();
    const auto gate = device_->PackLinear({layer.gate_weight.tensor});
    MoeParams params = Params(layer, num_rows);
    params.input = Upload(input);
    params.norm_weight = Upload(layer.norm_weight);
    params.gate_weight = gate->get();
    params.gate_bias = Upload(layer.bias);
    params.experts = experts->get();
    params.output = Upload(empty.out);
    params.topk_ids = Upload(empty.ids);
    params.topk_weights = Upload(empty.weights);
    // Room for more rows than there are: sizes come from maxima.
    params.workspace = Workspace(device_->MoeWorkspaceBytes(
        num_rows + 3, layer.gate, layer.hidden, layer.intermediate, layer.shared_intermediate));
    const absl::Status status = device_->Moe({}, params);
    EXPECT_TRUE(status.ok()) << status;
    return {Download(params.output, empty.out.size()), Download(params.topk_ids, empty.ids.size()),
            Download(params.topk_weights, empty.weights.size())};
  }
  // Run twice, and for parts of the rows by themselves: the same bits.
  struct Part {
    int32_t first, rows;
  };
  void ExpectPartsGiveTheSame(const Layer& layer, const std::vector<float>& input, int32_t num_rows,
                              absl::Span<const Part> parts) {
    const Result together = RunOnDevice(layer, input, num_rows);
    EXPECT_TRUE(BitEqual(RunOnDevice(layer, input, num_rows).out, together.out));
    for (const Part& part : parts) {
      const auto begin = input.begin() + part.first * layer.hidden;
      const Result alone = RunOnDevice(layer, {begin, begin + part.rows * layer.hidden}, part.rows);
      EXPECT_TRUE(
          BitEqual(alone.out, absl::MakeConstSpan(together.out)
                                  .subspan(part.first * (layer.hidden + 1), alone.out.size())))
          << part.rows << " rows from " << part.first << " on";
    }
  }
  static MoeParams Params(const Layer& layer, int32_t num_rows) {
    MoeParams params;
    params.num_rows = num_rows;
    params.input_row_stride = layer.hidden;
    params.gate = layer.gate;
    params.output_row_stride = layer.hidden + 1;
    return params;
  }
  static Result Empty(const Layer& layer, int32_t num_rows) {
    const size_t pairs = static_cast<size_t>(num_rows) * layer.gate.top_k;
    return {std::vector<float>(num_rows * (layer.hidden + 1), kNan),
            std::vector<int32_t>(pairs, -7), std::vector<float>(pairs, kNan)};
  }
  void Compare(const Result& actual, const Result& expected) {
    EXPECT_EQ(actual.ids, expected.ids);
    EXPECT_TRUE(AllClose(actual.weights, expected.weights, {.abs = 1e-6, .rel = 1e-5}));
    // Sums of a few hundred products of unit size.
    EXPECT_TRUE(AllClose(actual.out, expected.out, {.abs = 5e-4, .rel = 5e-5, .cosine = 1e-9}));
  }
};

TEST_F(CudaMoeTest, EveryGateEqualsTheCpu) {
  const GateConfig gates[] = {
      {.method = GateMethod::kGreedy, .num_experts = 10, .top_k = 3},
      {.method = GateMethod::kGreedy, .num_experts = 64, .top_k = 6, .routed_scaling_factor = 3},
      {.method = GateMethod::kGreedy, .num_experts = 37, .top_k = 37},
      {.method = GateMethod::kGroupLimitedGreedy,
       .num_experts = 12,
       .top_k = 3,
       .num_groups = 4,
       .top_k_groups = 2,
       .routed_scaling_factor = 16},
      {.method = GateMethod::kNoAuxTc,
       .num_experts = 16,
       .top_k = 4,
       .num_groups = 4,
       .top_k_groups = 2,
       .norm_topk_prob = true,
       .routed_scaling_factor = 2.5f},
      {.method = GateMethod::kGreedy, .num_experts = 40, .top_k = 40, .norm_topk_prob = true},
      // More experts than a warp's lanes hold two of, or eight.
      {.method = GateMethod::kNoAuxTc,
       .num_experts = 256,
       .top_k = 8,
       .num_groups = 8,
       .top_k_groups = 4,
       .norm_topk_prob = true},
      {.method = GateMethod::kGreedy, .num_experts = 300, .top_k = 9},
  };
  for (const GateConfig& gate : gates) {
    SCOPED_TRACE(gate.num_experts);
    const Layer layer(gate, 48, 40, {56}, {"", DType::kBfloat16});
    for (const int32_t rows : {1, 2, 7, 33, 65}) {
      SCOPED_TRACE(rows);
      const std::vector<float> input = RandomFloats(rows * layer.hidden, 5);
      Compare(RunOnDevice(layer, input, rows), RunOnHost(layer, input, rows));
    }
  }
}

TEST_F(CudaMoeTest, EveryFormatAndSharedExpertsEqualTheCpu) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 5, .top_k = 2};
  for (const WeightKind& kind : AllWeightKinds()) {
    SCOPED_TRACE(kind.name);
    for (const std::vector<int64_t>& shared : {std::vector<int64_t>{}, {30}, {30, 18}}) {
      const Layer layer(gate, 72, 34, shared, kind);
      const std::vector<float> input = RandomFloats(9 * layer.hidden, 5);
      Compare(RunOnDevice(layer, input, 9), RunOnHost(layer, input, 9));
    }
  }
}

TEST_F(CudaMoeTest, ARowsBitsDoNotDependOnTheOthersAndTiesGoToTheLowerId) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 8, .top_k = 3};
  Layer layer(gate, 48, 40, {24}, {"", DType::kBfloat16});
  const std::vector<float> input = RandomFloats(70 * layer.hidden, 6);
  ExpectPartsGiveTheSame(layer, input, 70, {{0, 1}, {31, 1}, {32, 1}, {69, 1}});
  // Equal logits everywhere: the first experts, and one expert's tile gets every row.
  std::fill(layer.gate_weight.bytes.begin(), layer.gate_weight.bytes.end(), uint8_t{0});
  const Result tied = RunOnDevice(layer, input, 70);
  for (size_t i = 0; i < tied.ids.size(); ++i) EXPECT_EQ(tied.ids[i], static_cast<int32_t>(i % 3));
  Compare(tied, RunOnHost(layer, input, 70));
}

// A device that rounds activations to bf16 has one form for up to 8 rows, and one for more.
class CudaRoundingMoeTest : public CudaMoeTest {
 protected:
  CudaRoundingMoeTest() : CudaMoeTest(/*bfloat16=*/true) {}

  // Rounds up to three times, the normed row, the activated one and the expert's result, to 8 bits:
  // of the largest result.
  void CompareRounded(const Result& actual, const Result& expected) {
    EXPECT_EQ(actual.ids, expected.ids);
    EXPECT_TRUE(AllClose(actual.weights, expected.weights, {.abs = 1e-6, .rel = 1e-5}));
    float largest = 0;
    for (const float value : expected.out) {
      if (!std::isnan(value)) largest = std::max(largest, std::abs(value));
    }
    EXPECT_TRUE(AllClose(actual.out, expected.out, {.abs = 0x1p-7 * largest, .cosine = 1e-5}));
  }
};

const GateConfig kGroupedGate{.method = GateMethod::kNoAuxTc,
                              .num_experts = 12,
                              .top_k = 3,
                              .num_groups = 4,
                              .top_k_groups = 2,
                              .norm_topk_prob = true,
                              .routed_scaling_factor = 2.5f};

TEST_F(CudaRoundingMoeTest, EqualsTheCpuForEveryNumberOfRows) {
  struct Shape {
    int64_t hidden, intermediate;
    std::vector<int64_t> shared;
  };
  // Inner sizes below, at and above what a block's warps hold at once (2048), and hidden sizes of
  // which a warp has no whole number of chunks.
  for (const Shape& shape : {Shape{64, 32, {}},
                             {96, 160, {32}},
                             {128, 2112, {96, 32}},
                             {1440, 64, {32}},
                             {2048, 32, {64}},
                             {2080, 96, {2048}}}) {
    SCOPED_TRACE(testing::Message() << shape.hidden << ", " << shape.intermediate);
    const Layer layer(kGroupedGate, shape.hidden, shape.intermediate, shape.shared,
                      {"", DType::kBfloat16});
    for (const int32_t rows : {1, 2, 8, 9, 33, 130}) {
      SCOPED_TRACE(rows);
      const std::vector<float> input = RandomFloats(rows * layer.hidden, 5);
      CompareRounded(RunOnDevice(layer, input, rows), RunOnHost(layer, input, rows));
    }
  }
}

// Formats of routed and shared experts that have kernels of their own; the last have none.
struct Kinds {
  WeightKind routed, shared;
};
const WeightKind kFloat8{"e4m3", DType::kFloat8E4m3, 128, 128};
const WeightKind kFloat8Exponents{"e4m3_e8m0", DType::kFloat8E4m3, 128, 128, DType::kFloat8E8m0};
const WeightKind kFloat4{"e2m1", DType::kFloat4E2m1, 1, 32, DType::kFloat8E8m0};
const Kinds kQuantizedKinds[] = {{kFloat8, kFloat8},
                                 {kFloat8Exponents, kFloat8},
                                 {kFloat4, kFloat8Exponents},
                                 {kFloat4, kFloat4}};

TEST_F(CudaRoundingMoeTest, QuantizedEqualsTheCpuForEveryNumberOfRows) {
  struct Shape {
    int64_t hidden, intermediate;
    std::vector<int64_t> shared;
  };
  for (const Kinds& kinds : kQuantizedKinds) {
    // Depths of less than a chunk of every warp, of several, and of no whole number of them.
    for (const Shape& shape :
         {Shape{128, 128, {}}, {256, 384, {64}}, {256, 640, {320, 64}}, {2176, 128, {256}}}) {
      SCOPED_TRACE(testing::Message()
                   << kinds.routed.name << ", " << kinds.shared.name << " " << shape.hidden);
      const Layer layer(kGroupedGate, shape.hidden, shape.intermediate, shape.shared, kinds.routed,
                        kinds.shared);
      for (const int32_t rows : {1, 2, 8, 9, 70}) {
        SCOPED_TRACE(rows);
        const std::vector<float> input = RandomFloats(rows * layer.hidden, 5);
        CompareRounded(RunOnDevice(layer, input, rows), RunOnHost(layer, input, rows));
      }
    }
  }
}

// Tiles with few rows and full ones, experts with several, and depths that end within a stage.
TEST_F(CudaRoundingMoeTest, ManyQuantizedRowsEqualTheCpu) {
  struct Shape {
    int64_t hidden, intermediate;
    std::vector<int64_t> shared;
    int32_t num_experts, rows;
  };
  for (const Kinds& kinds : kQuantizedKinds) {
    for (const Shape& shape : {Shape{64, 32, {}, 12, 129},
                               {96, 160, {32}, 40, 300},
                               {224, 192, {208}, 3, 200},
                               {544, 224, {64}, 4, 400}}) {
      SCOPED_TRACE(testing::Message()
                   << kinds.routed.name << ", " << kinds.shared.name << " " << shape.rows);
      const GateConfig gate{.method = GateMethod::kGreedy,
                            .num_experts = shape.num_experts,
                            .top_k = 3,
                            .norm_topk_prob = true};
      const Layer layer(gate, shape.hidden, shape.intermediate, shape.shared, kinds.routed,
                        kinds.shared);
      const std::vector<float> input = RandomFloats(shape.rows * layer.hidden, 5);
      const Result actual = RunOnDevice(layer, input, shape.rows);
      CompareRounded(actual, RunOnHost(layer, input, shape.rows));
      EXPECT_TRUE(BitEqual(RunOnDevice(layer, input, shape.rows).out, actual.out));  // run twice
    }
  }
}

TEST_F(CudaRoundingMoeTest, OfFewQuantizedRowsEachHasItsOwnBits) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 40, .top_k = 6};
  for (const Kinds& kinds : kQuantizedKinds) {
    SCOPED_TRACE(kinds.routed.name);
    const Layer layer(gate, 256, 128, {192}, kinds.routed, kinds.shared);
    ExpectPartsGiveTheSame(layer, RandomFloats(8 * layer.hidden, 6), 8, {{0, 1}, {3, 1}, {7, 1}});
  }
}

TEST_F(CudaRoundingMoeTest, OfFewRowsEachHasItsOwnBits) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 40, .top_k = 6};
  for (const int64_t hidden : {96, 2048, 2112}) {
    SCOPED_TRACE(hidden);
    Layer layer(gate, hidden, 64, {32}, {"", DType::kBfloat16});
    const std::vector<float> input = RandomFloats(8 * layer.hidden, 6);
    ExpectPartsGiveTheSame(layer, input, 8, {{0, 1}, {3, 1}, {7, 1}});
    // Equal logits everywhere: every row to the same experts.
    std::fill(layer.gate_weight.bytes.begin(), layer.gate_weight.bytes.end(), uint8_t{0});
    const Result tied = RunOnDevice(layer, input, 8);
    for (size_t i = 0; i < tied.ids.size(); ++i) {
      EXPECT_EQ(tied.ids[i], static_cast<int32_t>(i % 6));
    }
    CompareRounded(tied, RunOnHost(layer, input, 8));
  }
}

// More experts than the blocks of one cluster choose among, and a row longer than a block takes at
// a time.
TEST_F(CudaRoundingMoeTest, FewRowsChooseAmongManyExperts) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 80, .top_k = 6};
  Layer layer(gate, 2112, 32, {32}, {"", DType::kBfloat16});
  for (const int32_t rows : {1, 2, 8}) {
    SCOPED_TRACE(rows);
    const std::vector<float> input = RandomFloats(rows * layer.hidden, 7);
    const Result actual = RunOnDevice(layer, input, rows);
    CompareRounded(actual, RunOnHost(layer, input, rows));
    EXPECT_TRUE(BitEqual(RunOnDevice(layer, input, rows).out, actual.out));  // run twice
  }
  // Of equal logits the first.
  std::fill(layer.gate_weight.bytes.begin(), layer.gate_weight.bytes.end(), uint8_t{0});
  const Result tied = RunOnDevice(layer, RandomFloats(3 * layer.hidden, 7), 3);
  for (size_t i = 0; i < tied.ids.size(); ++i) EXPECT_EQ(tied.ids[i], static_cast<int32_t>(i % 6));
}

// Tiles with few rows and full ones, experts with several.
TEST_F(CudaRoundingMoeTest, ManyRowsEqualTheCpu) {
  struct Shape {
    int64_t hidden, intermediate;
    std::vector<int64_t> shared;
    int32_t num_experts, rows;
  };
  for (const Shape& shape : {Shape{64, 32, {}, 12, 129},
                             {96, 160, {40}, 40, 300},
                             {136, 72, {200}, 3, 200},
                             {72, 40, {}, 20, 2200},
                             {520, 200, {64}, 4, 700}}) {
    SCOPED_TRACE(shape.rows);
    const GateConfig gate{.method = GateMethod::kGreedy,
                          .num_experts = shape.num_experts,
                          .top_k = 3,
                          .norm_topk_prob = true};
    const Layer layer(gate, shape.hidden, shape.intermediate, shape.shared, {"", DType::kBfloat16});
    const std::vector<float> input = RandomFloats(shape.rows * layer.hidden, 5);
    CompareRounded(RunOnDevice(layer, input, shape.rows), RunOnHost(layer, input, shape.rows));
  }
}

TEST_F(CudaRoundingMoeTest, OfManyRowsEachHasItsOwnBits) {
  // With a few rows an expert, and with many, which have wider tiles.
  for (const auto& [num_experts, top_k] : {std::pair{40, 6}, {4, 3}}) {
    SCOPED_TRACE(num_experts);
    const GateConfig gate{
        .method = GateMethod::kGreedy, .num_experts = num_experts, .top_k = top_k};
    Layer layer(gate, 96, 64, {32}, {"", DType::kBfloat16});
    const std::vector<float> input = RandomFloats(400 * layer.hidden, 6);
    ExpectPartsGiveTheSame(layer, input, 400, {{77, 150}, {77, 9}});
    // Equal logits everywhere: every row to the same experts, the others have none.
    std::fill(layer.gate_weight.bytes.begin(), layer.gate_weight.bytes.end(), uint8_t{0});
    const Result tied = RunOnDevice(layer, input, 400);
    for (size_t i = 0; i < tied.ids.size(); ++i) {
      EXPECT_EQ(tied.ids[i], static_cast<int32_t>(i) % top_k);
    }
    CompareRounded(tied, RunOnHost(layer, input, 400));
  }
}

TEST_F(CudaMoeTest, RefusesWhatCannotBe) {
  const GateConfig gate{.method = GateMethod::kGreedy, .num_experts = 3, .top_k = 2};
  const Layer layer(gate, 8, 8, {}, {"", DType::kBfloat16});
  const auto experts = device_->PackExperts(layer.routed, {});
  const auto packed_gate = device_->PackLinear({layer.gate_weight.tensor});
  MoeParams params = Params(layer, 1);
  params.experts = experts->get();
  params.gate_weight = packed_gate->get();
  EXPECT_THAT(std::string(device_->Moe({}, params).message()), HasSubstr("no workspace"));
  params.gate.top_k = 4;
  EXPECT_THAT(std::string(device_->Moe({}, params).message()), HasSubstr("4 of 3 experts"));
  std::vector<ExpertTensors> uneven = layer.routed;
  uneven[1].up.rows = 4;
  EXPECT_EQ(device_->PackExperts(uneven, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->PackExperts({}, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kernels

#include "kernels/cuda/grouped_moe.h"

#include <algorithm>
#include <optional>

#include "kernels/cuda/expert_products.h"
#include "kernels/cuda/fragment_order.cuh"
#include "kernels/cuda/gate.h"
#include "kernels/cuda/grouped_route.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kValues = 8;  // bf16 values that a thread takes at a time

struct Workspace {
  ExpertChoice choice;
  int32_t* counters;           // [num_experts + 2] of the products' grid
  uint16_t* normed;            // [rows, hidden]
  uint16_t* sorted;            // [slots, hidden]
  uint16_t* activated;         // [slots, intermediate]
  uint16_t* out;               // [slots, hidden]
  uint16_t* shared_activated;  // [rows, shared intermediate]
  uint16_t* shared_out;        // [rows, hidden]
};

// ExpertProducts' num_drawn and num_stored.
__host__ __device__ int32_t NumCounters(int32_t num_experts) { return 1 + num_experts + 1; }

// Sets the pointers of `work` within `base` (null: only measures) and returns the size.
int64_t LayOut(std::byte* base, int64_t rows, const GateConfig& gate, int64_t hidden,
               int64_t intermediate, int64_t shared_intermediate, Workspace& work) {
  ScratchCarver carver(base);
  const int64_t slots = rows * gate.top_k;
  carver.Take(work.choice.ids, slots);
  carver.Take(work.choice.weights, slots);
  carver.Take(work.choice.count, gate.num_experts);
  carver.Take(work.choice.slot_row, slots);
  carver.Take(work.choice.slot_of_pair, slots);
  carver.Take(work.counters, NumCounters(gate.num_experts));
  carver.Take(work.normed, rows * hidden);
  carver.Take(work.sorted, slots * hidden);
  carver.Take(work.activated, slots * intermediate);
  carver.Take(work.out, slots * hidden);
  carver.Take(work.shared_activated, rows * shared_intermediate);
  carver.Take(work.shared_out, rows * hidden);
  return carver.size();
}

// Few enough for every row's block to look at all of them.
constexpr int32_t kFewSlots = 1024;
constexpr int32_t kMaxFewTopK = 32;

// The slots of a row's pairs: behind those of lower experts, and of the same one's earlier rows.
// The block's work; `slots` [top_k] shared.
__device__ void FindSlots(const ExpertChoice& choice, int64_t row, int32_t* slots) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_slots = choice.num_slots();
  for (int32_t k = static_cast<int32_t>(threadIdx.x) / kWarpSize; k < choice.top_k;
       k += kThreads / kWarpSize) {
    const auto own = static_cast<int32_t>(row) * choice.top_k + k;
    const int32_t expert = choice.ids[own];
    int32_t before = 0;
#pragma unroll 8
    for (int32_t pair = lane; pair < num_slots; pair += kWarpSize) {
      const int32_t id = choice.ids[pair];
      before += id < expert || (id == expert && pair < own) ? 1 : 0;
    }
    before = WarpSum(before);
    if (lane != 0) continue;
    slots[k] = before;
    choice.slot_of_pair[own] = before;
  }
  __syncthreads();
}

// sorted[slot] <- normed[row of slot], counters <- 0; with fp8 or fp4 experts both in the order of
// fragment_order.cuh.  Finds the slots first, or they are there.  One block a row.
__global__ void __launch_bounds__(kThreads)
    SortRowsKernel(ExpertChoice choice, uint16_t* normed, uint16_t* sorted, int64_t hidden,
                   ExpertFormats formats, int32_t* counters, bool finds_slots) {
  __shared__ int32_t found[kMaxFewTopK];
  WaitForPrevious();
  if (blockIdx.x == 0) {
    const int32_t num_counters = NumCounters(choice.num_experts);
    for (int32_t i = threadIdx.x; i < num_counters; i += kThreads) counters[i] = 0;
  }
  const int64_t row = blockIdx.x;
  const auto load = [&](int64_t i) {
    return i < hidden ? *reinterpret_cast<const uint4*>(normed + row * hidden + i) : uint4{};
  };
  const int64_t first = kValues * int64_t{threadIdx.x};
  uint4 values = load(first);  // while slots are found
  const int32_t* slots = finds_slots ? found : choice.slot_of_pair + row * choice.top_k;
  if (finds_slots) FindSlots(choice, row, found);
  const bool reorders = formats != ExpertFormats::kBfloat16;
  for (int64_t begin = 0; begin < hidden; begin += kValues * kThreads) {
    const int64_t i = begin + first;
    if (begin > 0) values = load(i);
    if (reorders) __syncthreads();  // neighbours have read what is written now
    if (i >= hidden) continue;
    for (int32_t k = 0; k < choice.top_k; ++k) {
      StoreOrdered(RoutedFormat(formats), sorted + slots[k] * hidden, i, values);
    }
    if (reorders) StoreOrdered(SharedFormat(formats), normed + row * hidden, i, values);
  }
}

struct CombineArgs {
  ExpertChoice choice;
  const float* input = nullptr;  // null: no residual
  int64_t input_row_stride = 0;
  const uint16_t* out = nullptr;         // [slots, hidden]
  const uint16_t* shared_out = nullptr;  // [rows, hidden]; null: no shared expert
  float* output = nullptr;
  int64_t output_row_stride = 0;
  bool aligned = false;  // the output's rows to 16 bytes
  int64_t hidden = 0;
};

// sums += weight * eight values.
__device__ void AddValues(float (&sums)[kValues], float weight, uint4 words) {
  const uint32_t word[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int32_t i = 0; i < kValues / 2; ++i) {
    sums[2 * i] = fmaf(weight, __uint_as_float(word[i] << 16), sums[2 * i]);
    sums[2 * i + 1] = fmaf(weight, __uint_as_float(word[i] & 0xffff0000), sums[2 * i + 1]);
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) CombineKernel(CombineArgs args) {
  constexpr int32_t kInFlight = 8;
  const int64_t row = blockIdx.x;
  const int32_t top_k = args.choice.top_k;
  const int32_t* slots = args.choice.slot_of_pair + row * top_k;
  const float* weights = args.choice.weights + row * top_k;
  // All but the experts' results is older than the kernel before, and loaded while that one runs.
  int32_t first_slots[kInFlight];
  float first_weights[kInFlight];
#pragma unroll
  for (int32_t i = 0; i < kInFlight; ++i) {
    first_slots[i] = i < top_k ? slots[i] : 0;
    first_weights[i] = i < top_k ? weights[i] : 0;
  }
  float4 before[2] = {};
  const auto load_before = [&](int64_t column) {
    if (args.input == nullptr || column >= args.hidden) return;
    const auto* from =
        reinterpret_cast<const float4*>(args.input + row * args.input_row_stride + column);
    before[0] = from[0];
    before[1] = from[1];
  };
  load_before(kValues * int64_t{threadIdx.x});
  WaitForPrevious();
  for (int64_t column = kValues * int64_t{threadIdx.x}; column < args.hidden;
       column += kValues * kThreads) {
    float sums[kValues] = {};
    uint4 shared_values = {};
    if (column >= kValues * kThreads) load_before(column);
    if (args.shared_out != nullptr) {
      shared_values = *reinterpret_cast<const uint4*>(args.shared_out + row * args.hidden + column);
    }
    for (int32_t begin = 0; begin < top_k; begin += kInFlight) {
      uint4 values[kInFlight];
#pragma unroll
      for (int32_t i = 0; i < kInFlight; ++i) {
        if (begin + i >= top_k) continue;
        const int32_t slot = begin == 0 ? first_slots[i] : slots[begin + i];
        values[i] = *reinterpret_cast<const uint4*>(args.out + slot * args.hidden + column);
      }
#pragma unroll
      for (int32_t i = 0; i < kInFlight; ++i) {
        if (begin + i >= top_k) continue;
        AddValues(sums, begin == 0 ? first_weights[i] : weights[begin + i], values[i]);
      }
    }
    if (args.shared_out != nullptr) AddValues(sums, 1, shared_values);
    float* output = args.output + row * args.output_row_stride + column;
    const float out[kValues] = {before[0].x + sums[0], before[0].y + sums[1], before[0].z + sums[2],
                                before[0].w + sums[3], before[1].x + sums[4], before[1].y + sums[5],
                                before[1].z + sums[6], before[1].w + sums[7]};
    if (args.aligned) {
      auto* to = reinterpret_cast<float4*>(output);
      to[0] = make_float4(out[0], out[1], out[2], out[3]);
      to[1] = make_float4(out[4], out[5], out[6], out[7]);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kValues; ++i) output[i] = out[i];
    }
  }
}

}  // namespace

absl::StatusOr<GroupedExperts> MapExperts(absl::Span<const StoredMatrix> matrices,
                                          int64_t num_routed) {
  GroupedExperts experts;
  experts.num_routed = num_routed;
  const int64_t num_shared = static_cast<int64_t>(matrices.size()) / 3 - num_routed;
  const std::optional<ExpertFormats> formats = ExpertFormatsOf(matrices, num_routed);
  if (num_shared > 1 || !formats.has_value()) return experts;
  experts.formats = *formats;
  const auto at = [&](int64_t i) -> const StoredMatrix& {
    return matrices[static_cast<size_t>(i)];
  };
  const auto bytes_between = [](const void* from, const void* to) {
    return static_cast<const std::byte*>(to) - static_cast<const std::byte*>(from);
  };
  const int64_t stride = num_routed > 1 ? bytes_between(at(0).data, at(3).data) : 0;
  const int64_t scale_stride = num_routed > 1 ? bytes_between(at(0).scales, at(3).scales) : 0;
  for (int64_t i = 0; i < 3 * num_routed; ++i) {
    if (bytes_between(at(i % 3).data, at(i).data) != i / 3 * stride ||
        bytes_between(at(i % 3).scales, at(i).scales) != i / 3 * scale_stride) {
      return experts;
    }
  }
  const bool quantized = *formats != ExpertFormats::kBfloat16;
  const auto shape = [&](int64_t i, int64_t count) {
    return MatrixShape{at(i).data, at(i).rows, at(i).cols, at(i).cols, count, stride / 2};
  };
  const auto can_map = [&](int64_t i, int64_t count) {
    return quantized ? CanMapQuantized(at(i), count, stride) : CanMap(shape(i, count));
  };
  const auto map = [&](int64_t i, int64_t count, CUtensorMap& map,
                       QuantizedScales& scales) -> absl::Status {
    ASSIGN_OR_RETURN(
        map, quantized ? MapQuantized(at(i), count, stride) : MakeTensorMap(shape(i, count)));
    scales = {static_cast<const std::byte*>(at(i).scales), scale_stride};
    return absl::OkStatus();
  };
  const auto map_expert = [&](int64_t first, int64_t count, ExpertMaps& maps) -> absl::Status {
    RETURN_IF_ERROR(map(first, count, maps.gate, maps.gate_scales));
    RETURN_IF_ERROR(map(first + 1, count, maps.up, maps.up_scales));
    return map(first + 2, count, maps.down, maps.down_scales);
  };
  for (int64_t i = 0; i < 3 * (num_shared + 1); ++i) {
    const bool is_routed = i < 3;
    if (!can_map(is_routed ? i : 3 * num_routed + i % 3, is_routed ? num_routed : 1)) {
      return experts;
    }
  }
  experts.hidden_size = matrices[0].cols;
  experts.intermediate_size = matrices[0].rows;
  RETURN_IF_ERROR(map_expert(0, num_routed, experts.routed));
  if (num_shared == 1) {
    experts.shared_intermediate_size = at(3 * num_routed).rows;
    RETURN_IF_ERROR(map_expert(3 * num_routed, 1, experts.shared));
  }
  experts.mapped = true;
  return experts;
}

bool CanGroupMoe(const MoeParams& params, const GroupedExperts& experts,
                 const MatrixStack& gate_weight) {
  return experts.mapped && CanRouteGroups(params, experts.hidden_size, gate_weight);
}

int64_t GroupedMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                 int64_t moe_intermediate_size, int64_t shared_intermediate_size) {
  Workspace work;
  return LayOut(nullptr, max_rows, gate, hidden_size, moe_intermediate_size,
                shared_intermediate_size, work);
}

absl::Status GroupedMoe(const Launcher& launcher, const MoeParams& params,
                        const GroupedExperts& experts, const MatrixStack& gate_weight) {
  const int64_t hidden = experts.hidden_size, intermediate = experts.intermediate_size;
  const int64_t shared_intermediate = experts.shared_intermediate_size;
  Workspace work;
  LayOut(params.workspace, params.num_rows, params.gate, hidden, intermediate, shared_intermediate,
         work);
  work.choice.num_rows = params.num_rows;
  work.choice.num_experts = params.gate.num_experts;
  work.choice.top_k = params.gate.top_k;
  const int64_t slots = work.choice.num_slots();

  RETURN_IF_ERROR(RouteGroups(launcher, params, hidden, gate_weight, work.normed, work.choice));
  const bool few = experts.formats == ExpertFormats::kBfloat16 && slots <= kFewSlots &&
                   work.choice.top_k <= kMaxFewTopK;
  if (!few) RETURN_IF_ERROR(SortByExpert(launcher, work.choice));
  RETURN_IF_ERROR(Launch(
      launcher, "moe sort rows", SortRowsKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      work.choice, work.normed, work.sorted, hidden, experts.formats, work.counters, few));

  const bool has_shared = shared_intermediate > 0;
  ExpertProduct both;
  both.count = work.choice.count;
  both.num_experts = params.gate.num_experts;
  both.num_slots = slots;
  // Worth it from some rows an expert on, and while most experts' weights are read once.
  both.rows_stay = slots >= 32 * params.gate.num_experts && slots <= 112 * params.gate.num_experts;
  both.shared_rows = has_shared ? params.num_rows : 0;
  both.swiglu_limit = params.swiglu_limit;
  const auto set_input = [&](const uint16_t* rows, int64_t depth, const uint16_t* shared_rows,
                             int64_t shared_depth, ExpertProduct& product) -> absl::Status {
    product.depth = depth;
    product.shared_depth = shared_depth;
    ASSIGN_OR_RETURN(product.tokens,
                     MakeTensorMap({rows, slots, depth, depth}, {.rows = kTokenStep}));
    if (!has_shared) return absl::OkStatus();
    ASSIGN_OR_RETURN(product.shared_tokens,
                     MakeTensorMap({shared_rows, params.num_rows, shared_depth, shared_depth},
                                   {.rows = kTokenStep}));
    return absl::OkStatus();
  };
  ExpertProducts products{.gate_up = both,
                          .down = both,
                          .ids = few ? work.choice.ids : nullptr,
                          .num_drawn = work.counters,
                          .num_stored = work.counters + 1};
  ExpertProduct& gate_up = products.gate_up;
  RETURN_IF_ERROR(set_input(work.sorted, hidden, work.normed, hidden, gate_up));
  gate_up.first = experts.routed.gate;
  gate_up.second = experts.routed.up;
  gate_up.shared_first = experts.shared.gate;
  gate_up.shared_second = experts.shared.up;
  gate_up.columns = intermediate;
  gate_up.shared_columns = shared_intermediate;
  gate_up.out = work.activated;
  gate_up.shared_out = work.shared_activated;
  ExpertProduct& down = products.down;
  RETURN_IF_ERROR(
      set_input(work.activated, intermediate, work.shared_activated, shared_intermediate, down));
  down.first = down.second = experts.routed.down;
  down.shared_first = down.shared_second = experts.shared.down;
  down.columns = hidden;
  down.shared_columns = has_shared ? hidden : 0;
  down.out = work.out;
  down.shared_out = work.shared_out;
  if (experts.formats == ExpertFormats::kBfloat16) {
    RETURN_IF_ERROR(MultiplyExperts(launcher, products));
  } else {
    QuantizedProduct quantized;
    quantized.tiles = gate_up;
    quantized.swiglu = true;
    quantized.first = experts.routed.gate_scales;
    quantized.second = experts.routed.up_scales;
    quantized.shared_first = experts.shared.gate_scales;
    quantized.shared_second = experts.shared.up_scales;
    RETURN_IF_ERROR(MultiplyQuantizedExperts(launcher, quantized, experts.formats));
    quantized.tiles = down;
    quantized.swiglu = false;
    quantized.first = quantized.second = experts.routed.down_scales;
    quantized.shared_first = quantized.shared_second = experts.shared.down_scales;
    RETURN_IF_ERROR(MultiplyQuantizedExperts(launcher, quantized, experts.formats));
  }
  return Launch(
      launcher, "moe combine", CombineKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      CombineArgs{.choice = work.choice,
                  .input = params.residual ? params.input : nullptr,
                  .input_row_stride = params.input_row_stride,
                  .out = work.out,
                  .shared_out = has_shared ? work.shared_out : nullptr,
                  .output = params.output,
                  .output_row_stride = params.output_row_stride,
                  .aligned = reinterpret_cast<uintptr_t>(params.output) % 16 == 0 &&
                             params.output_row_stride % 4 == 0,
                  .hidden = hidden});
}

}  // namespace kernels::cuda

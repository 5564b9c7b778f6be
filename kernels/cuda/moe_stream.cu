#include "kernels/cuda/moe_stream.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tile_product.cuh"
#include "kernels/cuda/weight_stream.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kRouteThreads = 512;
constexpr int32_t kRouteWarps = kRouteThreads / kWarpSize;
constexpr int32_t kExpertsAtOnce = 4;  // of a warp that computes gate logits
constexpr int64_t kAlignment = 256;    // bytes
// Down projections are taken in units whose weights of a warp fit its registers.
constexpr int32_t kUnitSteps = kStepsInFlight * kStreamWarps;

struct Workspace {
  uint16_t* normed;            // [rows, hidden] bf16
  int32_t* ids;                // [rows, top_k]
  float* weights;              // [rows, top_k]
  int32_t* active_expert;      // [bound] the experts that have rows, ascending
  int32_t* active_count;       // [bound] rows of each; 0: there are no more
  int32_t* active_pairs;       // [bound, rows] pairs (row * top_k + i) of each, ascending
  uint16_t* activated;         // [rows * top_k, intermediate] bf16, by pair
  uint16_t* shared_activated;  // per shared expert [rows, its intermediate]
};

int64_t LayOut(std::byte* base, int64_t rows, const GateConfig& gate, int64_t hidden,
               int64_t intermediate, int64_t shared_intermediate, Workspace& work) {
  int64_t size = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = base == nullptr ? nullptr : reinterpret_cast<T*>(base + size);
    size += CeilDiv(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
  };
  const int64_t pairs = rows * gate.top_k;
  const int64_t bound = pairs < gate.num_experts ? pairs : gate.num_experts;
  take(work.normed, rows * hidden);
  take(work.ids, pairs);
  take(work.weights, pairs);
  take(work.active_expert, bound);
  take(work.active_count, bound);
  take(work.active_pairs, bound * rows);
  take(work.activated, pairs * intermediate);
  take(work.shared_activated, rows * shared_intermediate);
  return size;
}

// ---- route

__device__ void GateLogits(const MatrixStack& gate, int32_t num_experts, int64_t hidden,
                           const float* x, float* logits) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const StoredMatrix& matrix = gate.parts[0];
  const bool streams = gate.num_parts == 1 && matrix.dtype == DType::kBfloat16 &&
                       matrix.scales == nullptr && hidden % 8 == 0;
  for (int32_t first = warp * kExpertsAtOnce; first < num_experts;
       first += kRouteWarps * kExpertsAtOnce) {
    float sums[kExpertsAtOnce] = {};
    if (streams) {
      const uint16_t* rows[kExpertsAtOnce];
      for (int32_t i = 0; i < kExpertsAtOnce; ++i) {
        rows[i] = static_cast<const uint16_t*>(matrix.data) +
                  int64_t{min(first + i, num_experts - 1)} * hidden;
      }
#pragma unroll 2
      for (int64_t k = 8 * lane; k < hidden; k += 8 * kWarpSize) {
        Words4 w[kExpertsAtOnce];
#pragma unroll
        for (int32_t i = 0; i < kExpertsAtOnce; ++i) w[i] = LoadStreaming(rows[i] + k);
#pragma unroll
        for (int32_t i = 0; i < kExpertsAtOnce; ++i) {
          const uint32_t words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
#pragma unroll
          for (int32_t j = 0; j < 4; ++j) {
            sums[i] = fmaf(x[k + 2 * j], __uint_as_float(words[j] << 16), sums[i]);
            sums[i] = fmaf(x[k + 2 * j + 1], __uint_as_float(words[j] & 0xffff0000u), sums[i]);
          }
        }
      }
    } else {
      for (int32_t i = 0; i < kExpertsAtOnce && first + i < num_experts; ++i) {
        for (int64_t k = lane; k < hidden; k += kWarpSize) {
          sums[i] = fmaf(x[k], LoadWeight(gate, first + i, k), sums[i]);
        }
      }
    }
    for (int32_t i = 0; i < kExpertsAtOnce; ++i) {
      const float sum = WarpSum(sums[i]);
      if (lane == 0 && first + i < num_experts) logits[first + i] = sum;
    }
  }
}

// The last block's work: which experts have rows, and which.  Shared memory: ids [pairs], count
// [num_experts].
__device__ void ListActive(const MoeParams& params, const Workspace& work, int32_t bound,
                           int32_t* ids, int32_t* count) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_experts = params.gate.num_experts;
  const int32_t num_pairs = params.num_rows * params.gate.top_k;
  for (int32_t e = threadIdx.x; e < num_experts; e += kRouteThreads) count[e] = 0;
  __syncthreads();
  for (int32_t p = threadIdx.x; p < num_pairs; p += kRouteThreads) {
    ids[p] = *static_cast<const volatile int32_t*>(&work.ids[p]);  // of other blocks
    atomicAdd(&count[ids[p]], 1);
  }
  __syncthreads();
  // A warp an expert; its index among the active ones is the number of active ones before it.
  for (int32_t expert = warp; expert < num_experts; expert += kRouteWarps) {
    if (count[expert] == 0) continue;
    int32_t active = 0;
    for (int32_t begin = 0; begin < expert; begin += kWarpSize) {
      const bool before = begin + lane < expert && count[begin + lane] > 0;
      active += __popc(__ballot_sync(kFullWarp, before));
    }
    int32_t* pairs = work.active_pairs + int64_t{active} * params.num_rows;
    int32_t found = 0;
    for (int32_t begin = 0; begin < num_pairs && found < count[expert]; begin += kWarpSize) {
      const int32_t pair = begin + lane;
      const bool ours = pair < num_pairs && ids[pair] == expert;
      const uint32_t lanes = __ballot_sync(kFullWarp, ours);
      if (ours) pairs[found + __popc(lanes & ((1u << lane) - 1))] = pair;
      found += __popc(lanes);
    }
    if (lane == 0) {
      work.active_expert[active] = expert;
      work.active_count[active] = found;
    }
  }
  if (warp != 0) return;
  int32_t num_active = 0;
  for (int32_t begin = 0; begin < num_experts; begin += kWarpSize) {
    const bool active = begin + lane < num_experts && count[begin + lane] > 0;
    num_active += __popc(__ballot_sync(kFullWarp, active));
  }
  for (int32_t a = num_active + lane; a < bound; a += kWarpSize) work.active_count[a] = 0;
}

// One block a row; the last one to finish lists what they chose.  Shared: the normed row and the
// logits, or the last block's lists.
__global__ void __launch_bounds__(kRouteThreads)
    RouteKernel(MoeParams params, MatrixStack gate_weight, int64_t hidden, int32_t bound,
                Workspace work, uint32_t* ticket) {
  __shared__ double scratch[33];
  __shared__ RowShared choice;
  __shared__ bool is_last;
  auto* x = reinterpret_cast<float*>(DynamicShared());
  float* logits = x + hidden;
  const int64_t row = blockIdx.x;
  const float* input = params.input + row * params.input_row_stride;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < hidden; i += kRouteThreads) {
    x[i] = input[i];
    sum += static_cast<double>(x[i]) * x[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(hidden) + static_cast<double>(params.norm_eps)));
  for (int64_t i = threadIdx.x; i < hidden; i += kRouteThreads) {
    x[i] = x[i] * inverse * params.norm_weight[i];
    work.normed[row * hidden + i] = static_cast<uint16_t>(PackBfloat16(x[i], 0));
  }
  __syncthreads();
  GateLogits(gate_weight, params.gate.num_experts, hidden, x, logits);
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const int32_t top_k = params.gate.top_k;
    int32_t* ids = work.ids + row * top_k;
    float* weights = work.weights + row * top_k;
    SelectRow(params, row, logits, choice, ids, weights);
    __syncwarp();
    for (int32_t i = threadIdx.x; i < top_k; i += kWarpSize) {
      if (params.topk_ids != nullptr) params.topk_ids[row * top_k + i] = ids[i];
      if (params.topk_weights != nullptr) params.topk_weights[row * top_k + i] = weights[i];
    }
    if (threadIdx.x == 0) {
      __threadfence();  // the ids, before the ticket that says so
      is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
      if (is_last) *ticket = 0;  // for the next launch
    }
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  auto* shared_ids = reinterpret_cast<int32_t*>(DynamicShared());
  ListActive(params, work, bound, shared_ids, shared_ids + params.num_rows * params.gate.top_k);
}

// ---- gate_up

struct Args {
  StreamExperts experts;
  Workspace work;
  int32_t num_rows;
  int32_t num_experts;
  int32_t top_k;
  int32_t bound;  // of active experts
  float swiglu_limit;
  const float* input;  // null: no residual
  int64_t input_row_stride;
  float* output;
  int64_t output_row_stride;
};

// Grid: the shared experts' tiles of 8 columns, then those of `bound` active experts.
template <int32_t kTiles>
__global__ void __launch_bounds__(kStreamThreads) GateUpKernel(Args args) {
  __shared__ WarpSums<kTiles> reduce;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const StreamExperts& experts = args.experts;
  const int64_t hidden = experts.hidden_size;

  int64_t tile = blockIdx.x;
  uint16_t* activated = args.work.shared_activated;
  int32_t shared = 0;
  for (; shared < experts.num_shared; ++shared) {
    const int64_t num_tiles = experts.shared_intermediate[shared] / kTokensPerTile;
    if (tile < num_tiles) break;
    tile -= num_tiles;
    activated += args.num_rows * experts.shared_intermediate[shared];
  }
  StreamExpert expert;
  int64_t intermediate;
  int32_t count = args.num_rows;
  const int32_t* pairs = nullptr;  // null: every row
  if (shared < experts.num_shared) {
    expert = experts.shared[shared];
    intermediate = experts.shared_intermediate[shared];
  } else {
    intermediate = experts.intermediate_size;
    const int64_t num_tiles = intermediate / kTokensPerTile;
    const int64_t active = tile / num_tiles;
    tile %= num_tiles;
    count = args.work.active_count[active];
    if (count == 0) return;
    expert = experts.routed[args.work.active_expert[active]];
    pairs = args.work.active_pairs + active * args.num_rows;
    activated = args.work.activated;
  }
  const int64_t row_offset = (tile * kTokensPerTile + g) * hidden + 8 * t;
  const StepRange steps = StepsOfWarp(static_cast<int32_t>(hidden / kStepDepth), warp);
  for (int32_t first = 0; first < count; first += kTiles * kTokensPerTile) {
    const uint16_t* x[kTiles];
    const auto find_rows = [&] {
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        const int32_t mine = first + i * kTokensPerTile + g;
        x[i] = nullptr;
        if (mine < count) {
          const int64_t row = pairs != nullptr ? pairs[mine] / args.top_k : mine;
          x[i] = args.work.normed + row * hidden + 8 * t;
        }
      }
    };
    const auto load_x = [&](int32_t i, int32_t step) {
      return x[i] == nullptr
                 ? ActivationFragment{}
                 : *reinterpret_cast<const ActivationFragment*>(x[i] + int64_t{step} * kStepDepth);
    };
    float sums[kTiles][4] = {};
    StreamRows<kTiles>(sums, expert.gate + row_offset, expert.up + row_offset, steps, load_x,
                       find_rows);
    const float4 total = ReduceOverWarps<kTiles>(sums, reduce);
    if (warp < kTiles) {
      const float values[2] = {SwiGlu(total.x, total.z, args.swiglu_limit),
                               SwiGlu(total.y, total.w, args.swiglu_limit)};
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t i = first + warp * kTokensPerTile + 2 * t + j;
        if (i >= count) continue;
        const int64_t to = pairs != nullptr ? pairs[i] : i;
        activated[to * intermediate + tile * kTokensPerTile + g] =
            static_cast<uint16_t>(PackBfloat16(values[j], 0));
      }
    }
    __syncthreads();
  }
}

// ---- down

// A piece of an expert's inner dimension, for the rows that have the expert.
struct Unit {
  const uint16_t* down = nullptr;
  const uint16_t* activated = nullptr;
  int64_t intermediate = 0;
  StepRange steps = {0, 0};
  int32_t begin = 0;  // its pairs in DownTables; -1: every row, with weight 1
  int32_t count = 0;
};

// In shared memory: what a block needs of the choices, so that no address waits for memory.
struct DownTables {
  float* sums;            // [warps, rows, 16]
  float* weights;         // [pairs], by expert
  int32_t* pairs;         // [pairs], by expert
  int32_t* begin;         // [bound + 1] of each active expert in these
  const uint16_t** down;  // [bound] weights of each active expert
};

__host__ __device__ inline size_t LayOut(std::byte* base, int32_t num_rows, int32_t num_pairs,
                                         int32_t bound, DownTables& tables) {
  std::byte* next = base;
  const auto take = [&](auto*& pointer, int32_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(next);
    next += CeilDiv(sizeof(T) * static_cast<size_t>(count), size_t{16}) * 16;
  };
  take(tables.sums, kStreamWarps * num_rows * kStreamRows);
  take(tables.weights, num_pairs);
  take(tables.pairs, num_pairs);
  take(tables.begin, bound + 1);
  take(tables.down, bound);
  return static_cast<size_t>(next - base);
}

// Fills the tables; returns the number of active experts.
__device__ int32_t FillTables(const Args& args, const DownTables& tables) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t a = threadIdx.x; a < args.bound; a += kStreamThreads) {
    if (args.work.active_count[a] > 0) {
      tables.down[a] = args.experts.routed[args.work.active_expert[a]].down;
    }
  }
  // Every warp counts; warp 0 writes the running totals.
  int32_t num_active = 0, total = 0;
  for (int32_t begin = 0; begin < args.bound; begin += kWarpSize) {
    const int32_t count = begin + lane < args.bound ? args.work.active_count[begin + lane] : 0;
    num_active += __popc(__ballot_sync(kFullWarp, count > 0));
    int32_t end = count;  // running total over the lanes
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, end, offset);
      if (lane >= offset) end += other;
    }
    if (threadIdx.x < kWarpSize && begin + lane < args.bound) {
      tables.begin[begin + lane + 1] = total + end;
    }
    total += __shfl_sync(kFullWarp, end, kWarpSize - 1);
  }
  if (threadIdx.x == 0) tables.begin[0] = 0;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < num_active * args.num_rows; i += kStreamThreads) {
    const int32_t active = i / args.num_rows, place = tables.begin[active] + i % args.num_rows;
    if (place >= tables.begin[active + 1]) continue;
    const int32_t pair = args.work.active_pairs[i];
    tables.pairs[place] = pair;
    tables.weights[place] = args.work.weights[pair];
  }
  for (int32_t i = threadIdx.x; i < kStreamWarps * args.num_rows * kStreamRows;
       i += kStreamThreads) {
    tables.sums[i] = 0;
  }
  __syncthreads();
  return num_active;
}

__device__ int32_t NumPieces(int64_t intermediate) {
  return CeilDiv(static_cast<int32_t>(intermediate / kStepDepth), kUnitSteps);
}
__device__ StepRange Piece(int64_t intermediate, int32_t piece) {
  const int32_t steps = static_cast<int32_t>(intermediate / kStepDepth);
  const int32_t pieces = NumPieces(intermediate);
  return {steps * piece / pieces, steps * (piece + 1) / pieces};
}

__device__ int32_t NumUnits(const Args& args, int32_t num_active) {
  int32_t size = num_active * NumPieces(args.experts.intermediate_size);
  for (int32_t s = 0; s < args.experts.num_shared; ++s) {
    size += NumPieces(args.experts.shared_intermediate[s]);
  }
  return size;
}

// Routed experts in ascending order, then the shared ones.
__device__ Unit UnitAt(const Args& args, const DownTables& tables, int32_t num_active,
                       int32_t index) {
  const StreamExperts& experts = args.experts;
  const int32_t pieces = NumPieces(experts.intermediate_size);
  if (index < num_active * pieces) {
    const int32_t active = index / pieces;
    const int32_t begin = tables.begin[active];
    return {tables.down[active],
            args.work.activated,
            experts.intermediate_size,
            Piece(experts.intermediate_size, index % pieces),
            begin,
            tables.begin[active + 1] - begin};
  }
  index -= num_active * pieces;
  const uint16_t* activated = args.work.shared_activated;
  int32_t s = 0;
  for (; index >= NumPieces(experts.shared_intermediate[s]); ++s) {
    index -= NumPieces(experts.shared_intermediate[s]);
    activated += args.num_rows * experts.shared_intermediate[s];
  }
  return {experts.shared[s].down,
          activated,
          experts.shared_intermediate[s],
          Piece(experts.shared_intermediate[s], index),
          -1,
          args.num_rows};
}

// The part of a unit's steps that `warp` has.
__device__ StepRange WarpSteps(const Unit& unit, int32_t warp) {
  const StepRange range = StepsOfWarp(unit.steps.end - unit.steps.begin, warp);
  return {unit.steps.begin + range.begin, unit.steps.begin + range.end};
}

// Adds a unit's products to the warp's sums.
__device__ void MultiplyUnit(const Args& args, const DownTables& tables, const Unit& unit,
                             const WeightFragment (&weights)[kStepsInFlight]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const StepRange steps = WarpSteps(unit, warp);
  float* warp_sums = tables.sums + warp * args.num_rows * kStreamRows;
  for (int32_t first = 0; first < unit.count; first += kTokensPerTile) {
    const int32_t mine = first + g;
    const bool exists = mine < unit.count;
    const int64_t at = !exists ? 0 : unit.begin < 0 ? mine : tables.pairs[unit.begin + mine];
    const uint16_t* x = unit.activated + at * unit.intermediate + 8 * t;
    float products[4] = {};
#pragma unroll
    for (int32_t i = 0; i < kStepsInFlight; ++i) {
      const int32_t step = steps.begin + i;
      if (step < steps.end) {
        const ActivationFragment fragment =
            exists ? *reinterpret_cast<const ActivationFragment*>(x + int64_t{step} * kStepDepth)
                   : ActivationFragment{};
        MultiplyStep(products, weights[i], fragment);
      }
    }
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t i = first + 2 * t + j;
      if (i >= unit.count) continue;
      const float weight = unit.begin < 0 ? 1.0f : tables.weights[unit.begin + i];
      const int32_t row = unit.begin < 0 ? i : tables.pairs[unit.begin + i] / args.top_k;
      float* sum = warp_sums + row * kStreamRows;
      sum[g] += weight * products[j];
      sum[g + kStreamRows / 2] += weight * products[2 + j];
    }
    __syncwarp();
  }
}

// Grid: tiles of 16 columns.
__global__ void __launch_bounds__(kStreamThreads, 1) DownKernel(Args args) {
  DownTables tables;
  LayOut(DynamicShared(), args.num_rows, args.num_rows * args.top_k, args.bound, tables);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int64_t column_begin = int64_t{blockIdx.x} * kStreamRows;
  const int32_t num_active = FillTables(args, tables);
  const int32_t num_units = NumUnits(args, num_active);
  const auto load = [&](int32_t index, WeightFragment(&weights)[kStepsInFlight]) {
    const Unit unit = UnitAt(args, tables, num_active, index);
    const StepRange steps = WarpSteps(unit, warp);
    const uint16_t* top = unit.down + (column_begin + g) * unit.intermediate + 8 * t;
    const uint16_t* bottom = top + kStreamRows / 2 * unit.intermediate;
#pragma unroll
    for (int32_t i = 0; i < kStepsInFlight; ++i) {
      if (steps.begin + i < steps.end) weights[i] = LoadWeights(top, bottom, steps.begin + i);
    }
  };
  // The next unit's weights are under way while this one's are used.
  WeightFragment even[kStepsInFlight], odd[kStepsInFlight];
  if (num_units > 0) load(0, even);
  for (int32_t u = 0; u < num_units; u += 2) {
    if (u + 1 < num_units) load(u + 1, odd);
    MultiplyUnit(args, tables, UnitAt(args, tables, num_active, u), even);
    if (u + 1 >= num_units) break;
    if (u + 2 < num_units) load(u + 2, even);
    MultiplyUnit(args, tables, UnitAt(args, tables, num_active, u + 1), odd);
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < args.num_rows * kStreamRows; i += kStreamThreads) {
    const int64_t row = i / kStreamRows, column = column_begin + i % kStreamRows;
    float sum = 0;
    for (int32_t w = 0; w < kStreamWarps; ++w) {
      sum += tables.sums[w * args.num_rows * kStreamRows + i];
    }
    if (args.input != nullptr) sum = args.input[row * args.input_row_stride + column] + sum;
    args.output[row * args.output_row_stride + column] = sum;
  }
}

}  // namespace

bool CanStreamMoe(const MoeParams& params, const StreamExperts& experts,
                  const MatrixStack& gate_weight) {
  if (experts.routed == nullptr || params.num_rows > kMaxStreamTokens ||
      gate_weight.num_parts != 1 || experts.hidden_size % kStepDepth != 0 ||
      experts.intermediate_size % kStepDepth != 0) {
    return false;
  }
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    if (experts.shared_intermediate[s] % kStepDepth != 0) return false;
  }
  DownTables tables;
  const int32_t num_pairs = params.num_rows * params.gate.top_k;
  const size_t row_bytes =
      sizeof(float) * static_cast<size_t>(experts.hidden_size + params.gate.num_experts);
  const size_t list_bytes =
      sizeof(int32_t) * static_cast<size_t>(num_pairs + params.gate.num_experts);
  constexpr size_t kStaticBytes = 16 * 1024;
  return std::max({row_bytes, list_bytes,
                   LayOut(nullptr, params.num_rows, num_pairs, params.gate.num_experts, tables)}) +
             kStaticBytes <=
         kMaxSharedBytes;
}

int64_t StreamMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                int64_t moe_intermediate_size, int64_t shared_intermediate_size) {
  Workspace work;
  return LayOut(nullptr, max_rows < kMaxStreamTokens ? max_rows : kMaxStreamTokens, gate,
                hidden_size, moe_intermediate_size, shared_intermediate_size, work);
}

absl::Status StreamMoe(const Launcher& launcher, const MoeParams& params,
                       const StreamExperts& experts, const MatrixStack& gate_weight) {
  Args args{.experts = experts,
            .work = {},
            .num_rows = params.num_rows,
            .num_experts = params.gate.num_experts,
            .top_k = params.gate.top_k,
            .bound = std::min(params.num_rows * params.gate.top_k, params.gate.num_experts),
            .swiglu_limit = params.swiglu_limit,
            .input = params.residual ? params.input : nullptr,
            .input_row_stride = params.input_row_stride,
            .output = params.output,
            .output_row_stride = params.output_row_stride};
  int64_t shared_intermediate = 0, shared_tiles = 0;
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    shared_intermediate += experts.shared_intermediate[s];
    shared_tiles += experts.shared_intermediate[s] / kTokensPerTile;
  }
  LayOut(params.workspace, params.num_rows, params.gate, experts.hidden_size,
         experts.intermediate_size, shared_intermediate, args.work);
  const int32_t num_pairs = params.num_rows * params.gate.top_k;
  const int64_t row_words = experts.hidden_size + params.gate.num_experts;
  const int64_t list_words = num_pairs + params.gate.num_experts;
  RETURN_IF_ERROR(Launch(
      launcher, "moe route", RouteKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)),
       .threads = kRouteThreads,
       .shared_bytes = sizeof(float) * static_cast<size_t>(std::max(row_words, list_words))},
      params, gate_weight, experts.hidden_size, args.bound, args.work, launcher.device.tickets));
  const int64_t blocks = shared_tiles + args.bound * (experts.intermediate_size / kTokensPerTile);
  const LaunchShape gate_up{.grid = dim3(static_cast<uint32_t>(blocks)), .threads = kStreamThreads};
  RETURN_IF_ERROR(params.num_rows <= kTokensPerTile
                      ? Launch(launcher, "moe gate_up", GateUpKernel<1>, gate_up, args)
                      : Launch(launcher, "moe gate_up", GateUpKernel<2>, gate_up, args));
  DownTables tables;
  return Launch(launcher, "moe down", DownKernel,
                {.grid = dim3(static_cast<uint32_t>(experts.hidden_size / kStreamRows)),
                 .threads = kStreamThreads,
                 .shared_bytes = LayOut(nullptr, params.num_rows, num_pairs, args.bound, tables)},
                args);
}

}  // namespace kernels::cuda

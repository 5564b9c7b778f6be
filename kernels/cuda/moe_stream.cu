#include "kernels/cuda/moe_stream.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/grid_barrier.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_choice.cuh"
#include "kernels/cuda/moe_sender.cuh"
#include "kernels/cuda/moe_stream_args.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

static_assert(kMaxStreamTokens <= kTokensPerTile);

int64_t LayOut(std::byte* base, int64_t rows, const GateConfig& gate, int64_t hidden,
               int64_t intermediate, int64_t shared_intermediate, MoeStreamWorkspace& work) {
  ScratchCarver carver(base);
  carver.Take(work.normed, rows * hidden);
  carver.Take(work.logits, rows * gate.num_experts);
  carver.Take(work.activated, rows * gate.top_k * intermediate);
  carver.Take(work.shared_activated, rows * shared_intermediate);
  return carver.size();
}

__host__ __device__ size_t LayOut(std::byte* base, const MoeStreamArgs& args,
                                  StreamTables& tables) {
  size_t size = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + size);
    size += CeilDiv(sizeof(*pointer) * static_cast<size_t>(count), size_t{16}) * 16;
  };
  const int32_t num_rows = args.params.num_rows, num_pairs = args.num_pairs();
  const int32_t num_pieces = NumPieces(args.experts);
  const size_t x_bytes = sizeof(float) * static_cast<size_t>(args.experts.hidden_size);
  tables.x = reinterpret_cast<float*>(base);
  take(tables.sums, 2);
  size = size > x_bytes ? size : CeilDiv(x_bytes, size_t{16}) * 16;
  take(tables.products, int64_t{num_pieces * num_rows + num_pairs} * kStreamRows);
  take(tables.experts, args.experts.num_shared + args.max_active());
  take(tables.units, num_pieces + args.max_active());
  take(tables.logits, int64_t{num_rows} * args.params.gate.num_experts);
  take(tables.choosing,
       static_cast<int64_t>(RowShared::Bytes(args.params.gate.num_experts)) * num_rows);
  take(tables.ids, num_pairs);
  take(tables.weights, num_pairs);
  take(tables.pairs, num_pairs);
  take(tables.place, num_pairs);
  take(tables.begin, args.max_active() + 1);
  take(tables.num_active, 1);
  return size;
}

// The shared experts to the tables; one thread's work.
__device__ void ListShared(const MoeStreamArgs& args, const StreamTables& tables) {
  const StreamExperts& experts = args.experts;
  const int32_t num_rows = args.params.num_rows;
  uint16_t* activated = args.work.shared_activated;
  int32_t unit = 0;
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    const auto intermediate = static_cast<int32_t>(experts.shared_intermediate[s]);
    const ExpertRows rows = {nullptr, num_rows};
    tables.experts[s] = {experts.shared[s].gate, experts.shared[s].up, activated, intermediate,
                         rows};
    const int32_t steps = intermediate / kStepDepth, count = NumPieces(experts, s);
    for (int32_t p = 0; p < count; ++p, ++unit) {
      tables.units[unit] = {experts.shared[s].down,
                            activated,
                            intermediate,
                            {steps * p / count, steps * (p + 1) / count},
                            rows,
                            unit * num_rows};
    }
    activated += num_rows * intermediate;
  }
}

// The chosen experts to the tables.
__device__ void ListChosen(const MoeStreamArgs& args, const StreamTables& tables) {
  const int32_t num_pieces = NumPieces(args.experts);
  const auto intermediate = static_cast<int32_t>(args.experts.intermediate_size);
  for (int32_t a = threadIdx.x; a < *tables.num_active; a += kStreamThreads) {
    const int32_t begin = tables.begin[a];
    const int32_t* pairs = tables.pairs + begin;
    const StreamExpert expert = args.experts.routed[tables.ids[*pairs]];
    const ExpertRows rows = {pairs, tables.begin[a + 1] - begin};
    tables.experts[args.experts.num_shared + a] = {expert.gate, expert.up, args.work.activated,
                                                   intermediate, rows};
    tables.units[num_pieces + a] = {expert.down,  args.work.activated,
                                    intermediate, {0, intermediate / kStepDepth},
                                    rows,         num_pieces * args.params.num_rows + begin};
  }
  __syncthreads();
}

// `bytes` of weights to the second-level cache.
__device__ void Prefetch(const void* from, int64_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :
               : "l"(from), "r"(static_cast<uint32_t>(bytes))
               : "memory");
}
// This lane's of the block's first 16 rows of down; -1: none.
__device__ int64_t FirstDownRow(const MoeStreamArgs& args) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kStreamRows + lane;
  return lane < kStreamRows && row < args.experts.hidden_size ? row : -1;
}
// The shared experts' part of these rows, and where the routed experts are, while it is not known
// yet which of them are chosen.
__device__ void PrefetchShared(const MoeStreamArgs& args) {
  constexpr int32_t kLine = 128;
  const auto bytes = static_cast<int32_t>(sizeof(StreamExpert)) * args.params.gate.num_experts;
  for (int32_t at = static_cast<int32_t>(threadIdx.x) * kLine; at < bytes;
       at += kStreamThreads * kLine) {
    asm volatile("prefetch.global.L2 [%0];"
                 :
                 : "l"(reinterpret_cast<const std::byte*>(args.experts.routed) + at));
  }
  const int64_t row = FirstDownRow(args);
  if (threadIdx.x >= kWarpSize || row < 0) return;
  for (int32_t s = 0; s < args.experts.num_shared; ++s) {
    const int64_t intermediate = args.experts.shared_intermediate[s];
    Prefetch(args.experts.shared[s].down + row * intermediate,
             intermediate * static_cast<int64_t>(sizeof(uint16_t)));
  }
}
// What does not fit into the ring of the warp's first unit, while other blocks are not done yet.
__device__ void PrefetchUnit(const MoeStreamArgs& args, const StreamTables& tables,
                             int32_t num_units) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int64_t row = FirstDownRow(args);
  if (warp >= num_units || row < 0) return;
  const DownUnit& unit = tables.units[warp];
  const int32_t begin = (unit.steps.begin + kChunks * kChunkSteps) * kStepDepth;
  const int32_t end = unit.steps.end * kStepDepth;
  if (begin >= end) return;
  Prefetch(unit.down + row * unit.intermediate + begin,
           (end - begin) * static_cast<int64_t>(sizeof(uint16_t)));
}

// activated = silu(W_gate a) * (W_up a): a block 8 columns of an expert at a time, its warps a part
// of the inner dimension each.
template <typename Send>
__device__ void GateUp(const MoeStreamArgs& args, const StreamTables& tables,
                       const StreamRing& ring, StepRange steps, int32_t num_experts, Send send) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int64_t hidden = args.experts.hidden_size;
  int32_t buffer = 0;
  for (GateUpCursor cursor(tables.experts); cursor.Find(num_experts); cursor.Next(), buffer ^= 1) {
    const GateUpExpert& expert = cursor.expert();
    const ExpertRows& rows = expert.rows;
    const int32_t mine = min(g, rows.count - 1);
    const int32_t row = rows.pairs != nullptr ? rows.pairs[mine] / args.params.gate.top_k : mine;
    const uint16_t* x[1] = {args.work.normed + row * hidden + 8 * t};
    float sums[1][4] = {};
    for (int32_t step = steps.begin; step < steps.end; step += kChunkSteps) {
      ring.Multiply<1>(sums, x, 1, step, steps.end - step);
      send();
    }
    const float4 total = ReduceOverWarps<1>(sums, tables.sums[buffer]);
    if (threadIdx.x >= kWarpSize) continue;
    const float values[2] = {SwiGlu(total.x, total.z, args.params.swiglu_limit),
                             SwiGlu(total.y, total.w, args.params.swiglu_limit)};
    for (int32_t j = 0; j < 2; ++j) {
      if (2 * t + j >= rows.count) continue;
      const int64_t to = rows.pairs != nullptr ? rows.pairs[2 * t + j] : 2 * t + j;
      expert.activated[to * expert.intermediate + cursor.column() + g] =
          static_cast<uint16_t>(PackBfloat16(values[j], 0));
    }
  }
}

// out = x + sum of weight * W_down activated: a block 16 columns at a time, its warps an expert
// each.  A row's contributions are added in the order of its experts, the shared ones last,
// whatever warp computed them.
template <typename Send>
__device__ void Down(const MoeStreamArgs& args, const StreamTables& tables, const StreamRing& ring,
                     int32_t num_units, Send send) {
  const MoeParams& params = args.params;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int32_t num_tiles = static_cast<int32_t>(args.experts.hidden_size) / kStreamRows;
  const int32_t num_pieces = NumPieces(args.experts), top_k = params.gate.top_k;
  for (DownCursor cursor; cursor.tile() < num_tiles; cursor.NextTile()) {
    for (; cursor.unit() < num_units; cursor.NextUnit()) {
      const DownUnit& unit = tables.units[cursor.unit()];
      const int32_t mine = min(g, unit.rows.count - 1);
      const int64_t at = unit.rows.pairs != nullptr ? unit.rows.pairs[mine] : mine;
      const uint16_t* x[1] = {unit.activated + at * unit.intermediate + 8 * t};
      float sums[1][4] = {};
      const int32_t end = unit.steps.end;
      StreamRing::Fragments<1> next;
      ring.Load<1>(next, x, 1, unit.steps.begin, end - unit.steps.begin);
      for (int32_t step = unit.steps.begin; step < end; step += kChunkSteps) {
        const StreamRing::Fragments<1> fragments = next;
        ring.Load<1>(next, x, 1, step + kChunkSteps, end - step - kChunkSteps);
        ring.Multiply<1>(sums, fragments, 1, end - step);
        send();
      }
      for (int32_t j = 0; j < 2; ++j) {
        if (2 * t + j >= unit.rows.count) continue;
        float* product = tables.products + (unit.product + 2 * t + j) * kStreamRows;
        product[g] = sums[0][j];
        product[g + kStreamRows / 2] = sums[0][2 + j];
      }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < params.num_rows * kStreamRows; i += kStreamThreads) {
      const int32_t row = i / kStreamRows, c = i % kStreamRows;
      float sum = 0;
      for (int32_t pair = row * top_k; pair < (row + 1) * top_k; ++pair) {
        const int32_t product = num_pieces * params.num_rows + tables.place[pair];
        sum += tables.weights[pair] * tables.products[product * kStreamRows + c];
      }
      for (int32_t p = 0; p < num_pieces; ++p) {
        sum += tables.products[(p * params.num_rows + row) * kStreamRows + c];
      }
      const int64_t column = int64_t{cursor.tile()} * kStreamRows + c;
      if (params.residual) sum = params.input[row * params.input_row_stride + column] + sum;
      params.output[row * params.output_row_stride + column] = sum;
    }
    __syncthreads();
  }
}

// Grid: as many blocks as there are multiprocessors.  Shared: the ring, the tables.
__global__ void __launch_bounds__(kStreamThreads, 1)
    StreamKernel(const __grid_constant__ MoeStreamArgs args) {
  StreamRing ring(DynamicShared());
  StreamTables tables;
  LayOut(DynamicShared() + StreamRing::kBytes, args, tables);
  if (threadIdx.x == 0) ListShared(args, tables);
  __syncthreads();
  const StepRange steps = StepsOfWarp(static_cast<int32_t>(args.experts.hidden_size / kStepDepth),
                                      static_cast<int32_t>(threadIdx.x) / kWarpSize);
  StreamSender sender(args, tables, steps);
  int32_t sent = 0;
  const auto send_shared = [&] {
    while (sent < kChunks && sender.Send(ring)) ++sent;
    PrefetchShared(args);
  };
  // All wait for those blocks that route, so these do nothing else before.
  const bool routes = static_cast<int32_t>(blockIdx.x) < NumRouteTasks(args);
  if (routes) RouteRows(args, tables.x);
  send_shared();
  if (!routes) WaitForPrevious();
  WaitForSignals(args.routed, static_cast<uint32_t>(NumRouteTasks(args)));
  ChooseRows(args, tables);
  SortPairs(args, tables);
  ListChosen(args, tables);
  const int32_t num_active = *tables.num_active;
  sender.Choose(num_active);
  const auto send = [&] {
    if (!sender.Send(ring)) ring.PushNothing();
  };
  for (; sent < kChunks; ++sent) send();
  GateUp(args, tables, ring, steps, args.experts.num_shared + num_active, send);
  const int32_t num_units = NumPieces(args.experts) + num_active;
  PrefetchUnit(args, tables, num_units);
  WaitForGrid(args.barrier);
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.routed = 0;  // everybody has seen it
  Down(args, tables, ring, num_units, send);
}

size_t SharedBytes(const MoeStreamArgs& args) {
  StreamTables tables;
  return StreamRing::kBytes + LayOut(nullptr, args, tables);
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
  constexpr size_t kStaticBytes = 1024;
  return SharedBytes({.params = params, .gate = gate_weight, .experts = experts}) + kStaticBytes <=
         kMaxSharedBytes;
}

int64_t StreamMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                int64_t moe_intermediate_size, int64_t shared_intermediate_size) {
  MoeStreamWorkspace work;
  return LayOut(nullptr, std::min(max_rows, kMaxStreamTokens), gate, hidden_size,
                moe_intermediate_size, shared_intermediate_size, work);
}

absl::Status StreamMoe(const Launcher& launcher, const MoeParams& params,
                       const StreamExperts& experts, const MatrixStack& gate_weight) {
  MoeStreamArgs args{.params = params,
                     .gate = gate_weight,
                     .experts = experts,
                     .work = {},
                     .routed = launcher.device.tickets,
                     .barrier = launcher.device.barrier};
  int64_t shared_intermediate = 0;
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    shared_intermediate += experts.shared_intermediate[s];
  }
  LayOut(params.workspace, params.num_rows, params.gate, experts.hidden_size,
         experts.intermediate_size, shared_intermediate, args.work);
  return Launch(launcher, "moe stream", StreamKernel,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kStreamThreads,
                 .shared_bytes = SharedBytes(args),
                 .early = true},
                args);
}

}  // namespace kernels::cuda

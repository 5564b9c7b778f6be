#include <type_traits>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/tensor_core.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kClusterThreads = kThreads + kWarpSize;  // the last ones rehearse
constexpr int32_t kBlockExperts = 8;
constexpr int32_t kClusterBlocks = 8;  // of a row, if there are no more
constexpr int32_t kPart = 8;           // neighbouring values that a thread takes at a time

// What the choice of a row's experts needs, and gives.
struct Choosing {
  std::byte* rows;  // as RowShared
  float* logits;    // [num_experts] of the row
  float* weights;   // [top_k] of the row
  int32_t* ids;     // [top_k] of the row
};
// A block's dynamic shared memory.
struct RouteShared {
  StreamExpert* experts;  // [num_experts]
  Choosing choosing;
  Choosing rehearsal;
  int32_t* ids;     // [rows, top_k]
  int32_t* count;   // [num_experts]
  int32_t* active;  // [num_experts]
  float* products;  // [hidden] of the row and the norm's weights
};
__host__ __device__ inline size_t LayOut(std::byte* base, const MoeStreamArgs& args,
                                         RouteShared& shared) {
  std::byte* next = base;
  const auto take = [&](auto*& pointer, size_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
    next += CeilDiv(bytes, size_t{16}) * 16;
  };
  const auto experts = static_cast<size_t>(args.num_experts);
  const auto top_k = static_cast<size_t>(args.top_k);
  take(shared.experts, sizeof(StreamExpert) * experts);
  for (Choosing* choosing : {&shared.choosing, &shared.rehearsal}) {
    take(choosing->rows, RowShared::Bytes(args.num_experts));
    take(choosing->logits, sizeof(float) * experts);
    take(choosing->weights, sizeof(float) * top_k);
    take(choosing->ids, sizeof(int32_t) * top_k);
  }
  take(shared.ids, sizeof(int32_t) * top_k * static_cast<size_t>(args.num_rows));
  take(shared.count, sizeof(int32_t) * experts);
  take(shared.active, sizeof(int32_t) * experts);
  take(shared.products, sizeof(float) * static_cast<size_t>(args.experts.hidden_size));
  return static_cast<size_t>(next - base);
}

// A barrier of the block's threads but for those that rehearse.
__device__ inline void SyncWorkers() {
  asm volatile("bar.sync 1, %0;" : : "n"(kThreads) : "memory");
}

// Which experts have rows, and which; the work of one block, after all rows.
__device__ void ListActive(const MoeStreamArgs& args, const RouteShared& shared) {
  const MoeStreamWorkspace& work = args.work;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_experts = args.num_experts;
  const int32_t num_pairs = args.num_rows * args.top_k;
  int32_t* count = shared.count;
  for (int32_t e = threadIdx.x; e < num_experts; e += kThreads) count[e] = 0;
  SyncWorkers();
  for (int32_t p = threadIdx.x; p < num_pairs; p += kThreads) {
    shared.ids[p] = *static_cast<const volatile int32_t*>(&work.ids[p]);  // of other blocks
    atomicAdd(&count[shared.ids[p]], 1);
  }
  SyncWorkers();
  if (threadIdx.x >= kWarpSize) return;
  // An expert's place among the active ones is the number of those before it.
  int32_t num_active = 0;
  for (int32_t begin = 0; begin < num_experts; begin += kWarpSize) {
    const int32_t expert = begin + lane;
    const int32_t rows = expert < num_experts ? count[expert] : 0;
    const uint32_t lanes = __ballot_sync(kFullWarp, rows > 0);
    if (rows > 0) {
      shared.active[expert] = num_active + __popc(lanes & ((1u << lane) - 1));
      work.active[shared.active[expert]] = {shared.experts[expert], rows};
      count[expert] = 0;  // from here on, of the pairs that have their place
    }
    num_active += __popc(lanes);
  }
  for (int32_t a = num_active + lane; a < args.bound; a += kWarpSize) work.active[a].count = 0;
  __syncwarp();
  for (int32_t begin = 0; begin < num_pairs; begin += kWarpSize) {
    const int32_t pair = begin + lane;
    const int32_t expert = pair < num_pairs ? shared.ids[pair] : -1;
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    const int32_t before = __popc(same & ((1u << lane) - 1));
    if (expert >= 0) {
      const int64_t list = int64_t{shared.active[expert]} * args.num_rows;
      work.active_pairs[list + count[expert] + before] = pair;
    }
    __syncwarp();
    if (expert >= 0 && before == 0) count[expert] += __popc(same);
    __syncwarp();
  }
}

// kPart values of a row.
struct RowPart {
  float4 values[kPart / 4];

  __device__ void Load(const float* from) {
    values[0] = reinterpret_cast<const float4*>(from)[0];
    values[1] = reinterpret_cast<const float4*>(from)[1];
  }
};
__device__ inline float4 Times(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ inline float AddProducts(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// As many of each of the block's experts.
struct GatePart {
  Words4 weights[kBlockExperts];

  // `gate` [num_experts, hidden]; experts past the last one are that one.
  __device__ void Load(const uint16_t* gate, int64_t hidden, int32_t first, int32_t num_experts,
                       int64_t k) {
#pragma unroll
    for (int32_t e = 0; e < kBlockExperts; ++e) {
      weights[e] = LoadStreaming(gate + min(first + e, num_experts - 1) * hidden + k);
    }
  }
  __device__ void Multiply(const RowPart& x, float (&sums)[kBlockExperts]) const {
#pragma unroll
    for (int32_t e = 0; e < kBlockExperts; ++e) {
      const uint32_t words[4] = {weights[e].x, weights[e].y, weights[e].z, weights[e].w};
#pragma unroll
      for (int32_t i = 0; i < kPart / 4; ++i) {
        const uint32_t low = words[2 * i], high = words[2 * i + 1];
        sums[e] = AddProducts(
            x.values[i],
            make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                        __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u)),
            sums[e]);
      }
    }
  }
};

// The warp's sum of sums[lane / 4].
__device__ inline float SumOfMine(const float (&sums)[kBlockExperts]) {
  static_assert(kBlockExperts * 4 == kWarpSize);
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  float left[kBlockExperts];
#pragma unroll
  for (int32_t i = 0; i < kBlockExperts; ++i) left[i] = sums[i];
#pragma unroll
  for (int32_t half = kBlockExperts / 2; half > 0; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int32_t i = 0; i < half; ++i) {
      const float mine = upper ? left[i + half] : left[i];
      const float other = upper ? left[i] : left[i + half];
      left[i] = mine + __shfl_xor_sync(kFullWarp, other, 4 * half);
    }
  }
  left[0] += __shfl_xor_sync(kFullWarp, left[0], 2);
  return left[0] + __shfl_xor_sync(kFullWarp, left[0], 1);
}

// True in the block that finishes last of `count`; it sees what the others wrote.  `ticket` counts
// them and is left zero.
__device__ bool IsLast(uint32_t* ticket, uint32_t count, bool& shared) {
  SyncWorkers();
  if (threadIdx.x == 0) {
    __threadfence();
    shared = atomicAdd(ticket, 1u) == count - 1;
    if (shared) *ticket = 0;
    __threadfence();
  }
  SyncWorkers();
  return shared;
}

struct RouteArgs {
  MoeParams params;
  const uint16_t* gate;  // [num_experts, hidden]
  MoeStreamArgs stream;
  uint32_t* tickets;
};

// A block's experts against a row, and in one of the row's blocks the choice.  The row's blocks are
// a cluster, or whichever is last chooses.
template <bool kCluster>
__device__ void Route(const RouteArgs& args) {
  __shared__ float parts[kWarps][kBlockExperts + 1];  // of the logits and of the row's square
  __shared__ bool is_last;
  const MoeParams& params = args.params;
  const MoeStreamArgs& stream = args.stream;
  const MoeStreamWorkspace& work = stream.work;
  RouteShared shared;
  LayOut(DynamicShared(), stream, shared);
  const int64_t hidden = stream.experts.hidden_size;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int32_t num_experts = stream.num_experts;
  const int64_t row = blockIdx.x;
  const int32_t first_expert = static_cast<int32_t>(blockIdx.y) * kBlockExperts;
  const int64_t first = int64_t{thread} * kPart;
  Choosing choosing = shared.choosing;
  const bool rehearses = kCluster && warp == kWarps;
  if (rehearses) {
    ArriveAtCluster();
    WaitForCluster();
    ArriveAtCluster();
    choosing = shared.rehearsal;
    for (int32_t e = lane; e < num_experts; e += kWarpSize) choosing.logits[e] = 0;
    __syncwarp();
  } else {
    GatePart gate = {};
    RowPart norm = {};
    if (first < hidden) {
      gate.Load(args.gate, hidden, first_expert, num_experts, first);
      norm.Load(params.norm_weight + first);
    }
    constexpr auto kExpertWords = static_cast<int32_t>(sizeof(StreamExpert) / sizeof(uint4));
    for (int32_t i = thread; i < kExpertWords * num_experts; i += kThreads) {
      reinterpret_cast<uint4*>(shared.experts)[i] =
          reinterpret_cast<const uint4*>(stream.experts.routed)[i];
    }
    if (kCluster) ArriveAtCluster();  // from where on the others have shared memory
    WaitForPrevious();
    const float* input = params.input + row * params.input_row_stride;
    const bool stores = blockIdx.y == gridDim.y - 1;
    float sums[kBlockExperts] = {};
    float square = 0;
    for (int64_t k = first; k < hidden; k += kPart * kThreads) {
      RowPart x;
      x.Load(input + k);
      if (k != first) {
        norm.Load(params.norm_weight + k);
        gate.Load(args.gate, hidden, first_expert, num_experts, k);
      }
#pragma unroll
      for (int32_t i = 0; i < kPart / 4; ++i) {
        square = AddProducts(x.values[i], x.values[i], square);
        x.values[i] = Times(x.values[i], norm.values[i]);
        if (stores) *reinterpret_cast<float4*>(shared.products + k + 4 * i) = x.values[i];
      }
      gate.Multiply(x, sums);
    }
    const float of_expert = SumOfMine(sums);
    square = WarpSum(square);
    if (lane % 4 == 0) parts[warp][lane / 4] = of_expert;
    if (lane == 0) parts[warp][kBlockExperts] = square;
    SyncWorkers();
    const auto add_parts = [&](int32_t of) {
      float sum = 0;
      for (int32_t w = 0; w < kWarps; ++w) sum += parts[w][of];
      return sum;
    };
    const float inverse = __frcp_rn(
        __fsqrt_rn(add_parts(kBlockExperts) / static_cast<float>(hidden) + params.norm_eps));
    if (kCluster) WaitForCluster();
    if (thread < kBlockExperts && first_expert + thread < num_experts) {
      const float logit = add_parts(thread) * inverse;
      if (kCluster) {
        StoreToRank(choosing.logits + first_expert + thread, 0, logit);
      } else {
        work.logits[row * num_experts + first_expert + thread] = logit;
      }
    }
    if (kCluster) ArriveAtCluster();
    if (stores) {
      const WeightFormat format = RoutedFormat(stream.experts.formats);
      for (int64_t k = thread; k < hidden; k += kThreads) {
        work.normed[row * hidden + ActivationPlace(format, k)] =
            static_cast<uint16_t>(PackBfloat16(shared.products[k] * inverse, 0));
      }
    }
    if (kCluster) {
      WaitForCluster();
      if (blockIdx.y != 0) return;
    } else {
      if (!IsLast(&args.tickets[1 + row], gridDim.y, is_last)) return;
      for (int32_t e = thread; e < num_experts; e += kThreads) {
        choosing.logits[e] =
            *static_cast<const volatile float*>(&work.logits[row * num_experts + e]);
      }
      SyncWorkers();
    }
  }
  if (warp == 0 || (rehearses && blockIdx.y == 0)) {
    SelectRow(params, row, choosing.logits, RowShared(choosing.rows, 0, num_experts), choosing.ids,
              choosing.weights);
    __syncwarp();
  }
  if (rehearses) {
    WaitForCluster();
    WaitForPrevious();
    return;
  }
  if (warp == 0) {
    OutputChoice(params, row, choosing.ids, choosing.weights);
    for (int32_t i = lane; i < stream.top_k; i += kWarpSize) {
      work.ids[row * stream.top_k + i] = choosing.ids[i];
      work.weights[row * stream.top_k + i] = choosing.weights[i];
      if (stream.num_rows > 1) continue;
      work.active[i] = {shared.experts[choosing.ids[i]], 1};
      work.active_pairs[i] = i;
    }
  }
  if (stream.num_rows == 1 || !IsLast(&args.tickets[0], gridDim.x, is_last)) return;
  ListActive(stream, shared);
}

// Grid: rows, groups of kBlockExperts experts.
__global__ void __launch_bounds__(kThreads) RouteKernel(const __grid_constant__ RouteArgs args) {
  Route<false>(args);
}
__global__ void __launch_bounds__(kClusterThreads) __cluster_dims__(1, kClusterBlocks)
    RouteClusterKernel(const __grid_constant__ RouteArgs args) {
  Route<true>(args);
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool CanRoute(const MoeParams& params, const MatrixStack& gate_weight) {
  const StoredMatrix& gate = gate_weight.parts[0];
  return gate_weight.num_parts == 1 && gate.dtype == DType::kBfloat16 && gate.scales == nullptr &&
         gate.cols % kPart == 0 && params.input_row_stride % 4 == 0 && IsAligned(params.input) &&
         IsAligned(params.norm_weight);
}

size_t RouteSharedBytes(const MoeStreamArgs& args) {
  RouteShared shared;
  return LayOut(nullptr, args, shared);
}

absl::Status RouteRows(const Launcher& launcher, const MoeParams& params,
                       const MatrixStack& gate_weight, const MoeStreamArgs& args) {
  static_assert(kMaxStreamTokens < kMaxTickets);
  const RouteArgs route{.params = params,
                        .gate = static_cast<const uint16_t*>(gate_weight.parts[0].data),
                        .stream = args,
                        .tickets = launcher.device.tickets};
  const int32_t groups = CeilDiv(args.num_experts, kBlockExperts);
  const bool cluster = groups <= kClusterBlocks;
  const dim3 grid(static_cast<uint32_t>(args.num_rows),
                  static_cast<uint32_t>(cluster ? kClusterBlocks : groups));
  return Launch(launcher, "moe route", cluster ? RouteClusterKernel : RouteKernel,
                {.grid = grid,
                 .threads = cluster ? kClusterThreads : kThreads,
                 .shared_bytes = RouteSharedBytes(args),
                 .early = true},
                route);
}

}  // namespace kernels::cuda

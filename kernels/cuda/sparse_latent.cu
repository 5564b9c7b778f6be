#include "kernels/cuda/sparse_latent.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/narrow_product.cuh"
#include "kernels/cuda/sparse_key.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kValueDim = 512;
constexpr int32_t kRope = kBoxColumns;
constexpr int32_t kValueBoxes = kValueDim / kBoxColumns;
// Boxes along a key, the rotary values in the last one: V3.2's latent has its value before them,
// V4's entry is its own value.
constexpr int32_t kLatentBoxes = kValueBoxes + 1;
constexpr int32_t kSharedKvBoxes = kValueBoxes;
constexpr int32_t kHeads = kProductRows;  // of a block
constexpr int32_t kKeys = 64;             // of a step
constexpr int32_t kStages = 2;
constexpr int32_t kSteps16 = kKeys / kProductDepth;
constexpr int32_t kGatherThreads = kWarpgroupThreads;
constexpr int32_t kThreads = 2 * kWarpgroupThreads + kGatherThreads;
constexpr int32_t kProductWarps = 2 * kWarpgroupThreads / kWarpSize;
constexpr int32_t kMinKeysPerPart = 2 * kKeys;
constexpr float kLog2E = 1.44269504f;
static_assert(kKeys == kBoxRows && kHeads == kBoxRows);

// Boxes are as the copy engine would have written them (tensor_map.h).
template <int32_t kBoxes>
struct Shared {
  uint16_t q[kBoxes][kBoxElements];
  uint16_t k[kStages][kBoxes][kBoxElements];
  uint4 weights[kSteps16][kWarpgroupThreads];  // left operands, from warpgroup 0 to 1
  float2 shrink[kWarpgroupThreads];            // of a thread's two rows; at the end their scale
  Barrier full[kStages], empty[kStages];
};
constexpr size_t kBoxAlignment = 1024;  // bytes
static_assert(sizeof(Shared<kLatentBoxes>) + kBoxAlignment <= kMaxSharedBytes);

struct Args {
  SparseDecodeParams params;
  SparseList list;
  SparseParts parts;
  float* values;
  int64_t row_stride;
  int64_t head_stride;
  Fault* fault;
  int32_t block_shift[2];  // of the sources' block sizes; -1: no power of two
};

// Barriers of the two warpgroups that multiply.
enum NamedBarrier : int32_t { kQueriesReady = 1, kWeightsReady, kWeightsFree };
__device__ void Sync(NamedBarrier barrier) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ void Pass(NamedBarrier barrier) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
}

// The steps of this block: keys [begin, end) of the row's list.
struct Part {
  int32_t begin;
  int32_t end;
  __device__ int32_t num_steps() const { return CeilDiv(end - begin, kKeys); }
};

__device__ Part PartOf(const Args& args, int32_t row, int32_t part, int32_t num_parts) {
  const int32_t count = args.list.counts[2 * row] + args.list.counts[2 * row + 1];
  const int32_t share = CeilDiv(CeilDiv(count, kKeys), num_parts) * kKeys;
  const int32_t begin = min(part * share, count);
  return {begin, min(begin + share, count)};
}

// The third warpgroup: gathers the keys of every step.
template <KvFormat kFormat, int32_t kBoxes>
__device__ void GatherKeys(Shared<kBoxes>& shared, const Args& args, int32_t row,
                           const Part& part) {
  constexpr int32_t kKeysAtATime = kGatherThreads / 8;
  constexpr int32_t kTurns = kKeys / kKeysAtATime;  // of a step
  constexpr int32_t kLoaded = 2;  // keys in registers: one is widened while the other comes
  static_assert(kTurns % kLoaded == 0);
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const int32_t lane = thread % 8;
  const int32_t first_key = thread / 8;
  const int32_t* slots = args.list.slots + row * args.list.stride + part.begin;
  const int32_t count = part.end - part.begin;
  const int32_t first_count = args.list.counts[2 * row] - part.begin;  // of the first source
  // Behind the last key stands the first one again: a number that weighs nothing.
  const auto key_of = [&](int32_t turn) {
    const int32_t key = turn * kKeysAtATime + first_key;
    return key < count ? key : 0;
  };
  const auto place_of = [&](int32_t key, int32_t slot) -> KeyPlace {
    const bool is_first = key < first_count;
    const KvPages& pages = args.params.sources[is_first ? 0 : 1].pages;
    const int32_t shift = args.block_shift[is_first ? 0 : 1];
    const int32_t block = shift >= 0 ? slot >> shift : slot / pages.block_size;
    const int32_t entry = slot - block * pages.block_size;
    const std::byte* base = pages.base + block * pages.block_stride;
    if constexpr (kFormat == KvFormat::kFp8SharedKv) {
      constexpr int32_t kRowBytes = (kBoxes - 1) * kBoxColumns + 2 * kRope;
      return {base + entry * kRowBytes, base + pages.block_size * kRowBytes + 8 * entry};
    } else {
      return {base + entry * pages.entry_bytes, nullptr};
    }
  };
  LaneKey<kFormat, kBoxes> keys[kLoaded];
  int32_t next_key[kLoaded], next_slot[kLoaded];
#pragma unroll
  for (int32_t i = 0; i < kLoaded; ++i) {
    const int32_t key = key_of(i);
    keys[i].Load(place_of(key, __ldg(slots + key)), lane);
    next_key[i] = key_of(i + kLoaded);
    next_slot[i] = __ldg(slots + next_key[i]);
  }
  const int32_t num_steps = part.num_steps();
  RingPosition<kStages> at;
#pragma unroll 1
  for (int32_t step = 0; step < num_steps; ++step, at.Advance()) {
    WaitFor(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t i = turn % kLoaded;
      const int32_t box_row = turn * kKeysAtATime + first_key;
      uint16_t* to = shared.k[at.stage][0] + box_row * kBoxColumns + (lane ^ box_row % 8) * 8;
      keys[i].Widen([&](int32_t box, const uint4& unit) {
        *reinterpret_cast<uint4*>(to + box * kBoxElements) = unit;
      });
      keys[i].Load(place_of(next_key[i], next_slot[i]), lane);
      next_key[i] = key_of(step * kTurns + turn + 2 * kLoaded);
      next_slot[i] = __ldg(slots + next_key[i]);
    }
    PublishShared();
    Arrive(&shared.full[at.stage]);
  }
}

// The block's query vectors, rounded; both warpgroups that multiply.
template <int32_t kBoxes>
__device__ void LoadQueries(Shared<kBoxes>& shared, const SparseDecodeParams& params, int32_t row,
                            int32_t first_head) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 8;
  const float* q = params.q + row * params.q_row_stride;
  const float* q_rope = params.q_rope + row * params.q_rope_row_stride;
#pragma unroll
  for (int32_t i = 0; i < kHeads / 32; ++i) {
    const int32_t box_row = static_cast<int32_t>(threadIdx.x) / 8 + 32 * i;
    const int64_t head = first_head + box_row;
    const bool exists = head < params.num_heads;
#pragma unroll
    for (int32_t box = 0; box < kBoxes; ++box) {
      const float* from = box < kBoxes - 1 ? q + head * params.q_head_stride + box * kBoxColumns
                                           : q_rope + head * params.q_rope_head_stride;
      const auto* values = reinterpret_cast<const float4*>(from) + 2 * lane;
      const float4 zeros = make_float4(0, 0, 0, 0);
      const float4 a = exists ? values[0] : zeros, b = exists ? values[1] : zeros;
      *reinterpret_cast<uint4*>(shared.q[box] + box_row * kBoxColumns + (lane ^ box_row % 8) * 8) =
          make_uint4(PackBfloat16(a.x, a.y), PackBfloat16(a.z, a.w), PackBfloat16(b.x, b.y),
                     PackBfloat16(b.z, b.w));
    }
  }
  PublishShared();
  Sync(kQueriesReady);
}

__device__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's two rows, of which it has every fourth pair of columns.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores, not scaled
  float sum[2] = {0, 0};                  // of this thread's columns
};

// scores -> weights relative to the rows' new largest; `shrink`: what earlier weights are worth
// now.
__device__ void Weigh(float (&scores)[32], float scale_log2, RowState& state, float (&shrink)[2]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float largest = state.max[i];
#pragma unroll
    for (int32_t j = 0; j < kKeys / 8; ++j) {
      largest = fmaxf(largest, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;
    shrink[i] = Exp2(fmaf(state.max[i], scale_log2, -base));
    state.max[i] = largest;
    float sum = state.sum[i] * shrink[i];
#pragma unroll
    for (int32_t j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int32_t c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * i + c];
        score = Exp2(fmaf(score, scale_log2, -base));
        sum += score;
      }
    }
    state.sum[i] = sum;
  }
}

// An operand this many elements further on.
__device__ uint64_t Further(uint64_t operand, int32_t elements) {
  return operand + static_cast<uint32_t>(elements) * sizeof(uint16_t) / 16;
}

template <int32_t kBoxes>
__device__ void BeginScores(const Shared<kBoxes>& shared, int32_t stage, float (&scores)[32]) {
  KeepSums(scores);
  BeginProducts();
  uint64_t q = DescribeRows(shared.q);
  asm volatile("" : "+l"(q));  // or every step of it would occupy registers between calls
  const uint64_t k = DescribeRows(shared.k[stage]);
#pragma unroll
  for (int32_t d = 0; d < kBoxes * kBoxColumns; d += kProductDepth) {
    const int32_t at = d / kBoxColumns * kBoxElements + d % kBoxColumns;
    MultiplyNarrow<LeftOperand::kBoxRows>(scores, Further(q, at), Further(k, at), d > 0);
  }
  CommitProducts();
}

// Half of the values, four boxes from `first_box` on.
template <int32_t kBoxes>
__device__ void BeginValues(const Shared<kBoxes>& shared, int32_t stage, int32_t first_box,
                            uint32_t (&weights)[kSteps16][4], float (&low)[kProductSums],
                            float (&high)[kProductSums]) {
  KeepSums(low);
  KeepSums(high);
  BeginProducts();
  const uint64_t values =
      DescribeColumns(shared.k[stage][first_box], kBoxElements * sizeof(uint16_t));
#pragma unroll
  for (int32_t k = 0; k < kSteps16; ++k) {
    const int32_t at = k * kProductDepth * kBoxColumns;
    MultiplyColumns(low, weights[k], Further(values, at));
    MultiplyColumns(high, weights[k], Further(values, at + 2 * kBoxElements));
  }
  CommitProducts();
}

__device__ void Shrink(const float (&shrink)[2], float (&low)[kProductSums],
                       float (&high)[kProductSums]) {
#pragma unroll
  for (int32_t j = 0; j < kProductSums; ++j) {
    low[j] *= shrink[j / 2 % 2];
    high[j] *= shrink[j / 2 % 2];
  }
}

// Where this block's values go, from its first head on.
struct Target {
  float* values;
  int64_t head_stride;
  const float* sink;  // of these heads; null: none
  bool rotate_back;
};

// What a sink with this logit leaves of the values.
__device__ float SinkFactor(float sink, float lse) { return 1.0f / (1.0f + expf(sink - lse)); }

// The pair i of the last values, rotated back.
__device__ float2 RotateBack(const RopeTable& rope, int32_t position, int32_t i, float2 pair) {
  const int64_t at = int64_t{position} * (kRope / 2) + i;
  const float cos = rope.cos[at], sin = -rope.sin[at];
  return make_float2(pair.x * cos - pair.y * sin, pair.y * cos + pair.x * sin);
}

// Whether the row's values are to be rotated back; a position outside the table is noted.
__device__ bool RotatesBack(const Args& args, int32_t row, bool notes) {
  const RopeTable& rope = args.params.inverse_rope;
  if (rope.rope_dim == 0) return false;
  const int32_t position = args.params.positions[row];
  if (position < rope.max_positions) return position >= 0;
  if (notes) NoteFault(args.fault, FaultKind::kPosition, row, position);
  return false;
}

__device__ void StoreValues(const Target& target, int32_t num_heads, int32_t first_column,
                            const float (&scale)[2], const float (&low)[kProductSums],
                            const float (&high)[kProductSums]) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  const int32_t lane = thread % kWarpSize;
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t head = 16 * (thread / kWarpSize) + lane / 4 + 8 * i;
    if (head >= num_heads) continue;
    float* to = target.values + head * target.head_stride + first_column + 2 * (lane % 4);
#pragma unroll
    for (int32_t j = 0; j < kProductSums / 4; ++j) {
      const auto pair = [&](const float(&sums)[kProductSums]) {
        return make_float2(sums[4 * j + 2 * i] * scale[i], sums[4 * j + 2 * i + 1] * scale[i]);
      };
      *reinterpret_cast<float2*>(to + 8 * j) = pair(low);
      *reinterpret_cast<float2*>(to + kProductColumns + 8 * j) = pair(high);
    }
  }
}

// The first warpgroup: scores, weights, and the first half of the values.
template <int32_t kBoxes>
__device__ void AttendFirst(Shared<kBoxes>& shared, const Args& args, int32_t num_keys,
                            const Target& target, int32_t num_heads, float* lse,
                            int64_t lse_stride) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % kWarpSize;
  const float scale_log2 = args.params.softmax_scale * kLog2E;
  RowState state;
  float low[kProductSums] = {}, high[kProductSums] = {};
  float scores[32], shrink[2];
  uint32_t weights[kSteps16][4];
  const int32_t num_steps = CeilDiv(num_keys, kKeys);
  // Weights of a step whose scores are done, for both warpgroups.
  const auto weigh = [&](int32_t step) {
    const int32_t left = num_keys - step * kKeys;
    if (left < kKeys) {
#pragma unroll
      for (int32_t j = 0; j < 32; ++j) {
        if (8 * (j / 4) + 2 * (lane % 4) + j % 2 >= left) scores[j] = -INFINITY;
      }
    }
    Weigh(scores, scale_log2, state, shrink);
#pragma unroll
    for (int32_t k = 0; k < kSteps16; ++k) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        weights[k][i] = PackBfloat16(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
      }
    }
    if (step > 0) Sync(kWeightsFree);
#pragma unroll
    for (int32_t k = 0; k < kSteps16; ++k) {
      shared.weights[k][thread] =
          make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
    }
    shared.shrink[thread] = make_float2(shrink[0], shrink[1]);
    Pass(kWeightsReady);
    Shrink(shrink, low, high);
  };
  WaitFor(&shared.full[0], 0);
  BeginScores(shared, 0, scores);
  WaitForProducts<0>();
  KeepSums(scores);
  weigh(0);
  RingPosition<kStages> at;  // of the keys whose values come next
  for (int32_t step = 1; step < num_steps; ++step) {
    const int32_t stage = at.stage;
    BeginValues(shared, stage, 0, weights, low, high);
    at.Advance();
    WaitFor(&shared.full[at.stage], at.parity);
    BeginScores(shared, at.stage, scores);
    WaitForProducts<1>();
    KeepSums(low);
    KeepSums(high);
    if (lane == 0) Arrive(&shared.empty[stage]);
    WaitForProducts<0>();
    KeepSums(scores);
    weigh(step);
  }
  BeginValues(shared, at.stage, 0, weights, low, high);
  WaitForProducts<0>();
  KeepSums(low);
  KeepSums(high);
  float scale[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const int32_t head = 16 * (thread / kWarpSize) + lane / 4 + 8 * i;
    const float row_lse = fmaf(state.max[i], args.params.softmax_scale, logf(sum));
    scale[i] = 1.0f / sum;
    if (target.sink != nullptr && head < num_heads) {
      scale[i] *= SinkFactor(target.sink[head], row_lse);
    }
    if (lane % 4 == 0 && lse != nullptr && head < num_heads) lse[head * lse_stride] = row_lse;
  }
  Sync(kWeightsFree);
  shared.shrink[thread] = make_float2(scale[0], scale[1]);
  Pass(kWeightsReady);
  StoreValues(target, num_heads, 0, scale, low, high);
}

// The second warpgroup: the other half of the values.
template <int32_t kBoxes>
__device__ void AttendSecond(Shared<kBoxes>& shared, const Args& args, int32_t row,
                             int32_t num_steps, const Target& target, int32_t num_heads) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  float low[kProductSums] = {}, high[kProductSums] = {};
  uint32_t weights[kSteps16][4];
  RingPosition<kStages> at;
  for (int32_t step = 0; step < num_steps; ++step, at.Advance()) {
    Sync(kWeightsReady);
#pragma unroll
    for (int32_t k = 0; k < kSteps16; ++k) {
      const uint4 four = shared.weights[k][thread];
      weights[k][0] = four.x;
      weights[k][1] = four.y;
      weights[k][2] = four.z;
      weights[k][3] = four.w;
    }
    const float2 two = shared.shrink[thread];
    Pass(kWeightsFree);
    const float shrink[2] = {two.x, two.y};
    Shrink(shrink, low, high);
    WaitFor(&shared.full[at.stage], at.parity);
    BeginValues(shared, at.stage, kValueBoxes / 2, weights, low, high);
    WaitForProducts<0>();
    KeepSums(low);
    KeepSums(high);
    if (thread % kWarpSize == 0) Arrive(&shared.empty[at.stage]);
  }
  Sync(kWeightsReady);
  const float2 two = shared.shrink[thread];
  if (target.rotate_back) {
    const RopeTable& rope = args.params.inverse_rope;
    const int32_t position = args.params.positions[row];
    // The last 64 columns, of both rows; the scale does not matter to a rotation.
#pragma unroll
    for (int32_t j = kProductSums / 8; j < kProductSums / 4; ++j) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const float2 pair = RotateBack(rope, position, 4 * (j - kProductSums / 8) + thread % 4,
                                       make_float2(high[4 * j + 2 * i], high[4 * j + 2 * i + 1]));
        high[4 * j + 2 * i] = pair.x;
        high[4 * j + 2 * i + 1] = pair.y;
      }
    }
  }
  const float scale[2] = {two.x, two.y};
  StoreValues(target, num_heads, kValueDim / 2, scale, low, high);
}

// A part without keys: zeros and -inf.
__device__ void StoreNothing(const Target& target, int32_t num_heads, float* lse,
                             int64_t lse_stride) {
  for (int32_t i = threadIdx.x; i < num_heads * kValueDim; i += kThreads) {
    target.values[i / kValueDim * target.head_stride + i % kValueDim] = 0;
  }
  for (int32_t head = threadIdx.x; lse != nullptr && head < num_heads; head += kThreads) {
    lse[head * lse_stride] = -INFINITY;
  }
}

// Grid: tiles of heads, parts of a row, rows.
template <KvFormat kFormat, int32_t kBoxes>
__global__ void __launch_bounds__(kThreads, 1)
    SparseLatentKernel(const __grid_constant__ Args args) {
  const auto address = reinterpret_cast<uintptr_t>(DynamicShared());
  auto& shared = *reinterpret_cast<Shared<kBoxes>*>((address + kBoxAlignment - 1) / kBoxAlignment *
                                                    kBoxAlignment);
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < kStages; ++s) {
      InitBarrier(&shared.full[s], kGatherThreads);
      InitBarrier(&shared.empty[s], kProductWarps);
    }
    PublishBarriers();
  }
  __syncthreads();
  WaitForPrevious();
  const SparseDecodeParams& params = args.params;
  const int32_t first_head = static_cast<int32_t>(blockIdx.x) * kHeads;
  const int32_t num_heads = min(kHeads, params.num_heads - first_head);
  const int32_t num_parts = static_cast<int32_t>(gridDim.y);
  const int32_t row = static_cast<int32_t>(blockIdx.z);
  const Part part = PartOf(args, row, static_cast<int32_t>(blockIdx.y), num_parts);
  Target target{args.values + row * args.row_stride + first_head * args.head_stride,
                args.head_stride, params.sink == nullptr ? nullptr : params.sink + first_head,
                num_parts == 1 && RotatesBack(args, row, threadIdx.x == 0)};
  float* lse = params.lse == nullptr ? nullptr : params.lse + first_head * params.lse_stride + row;
  int64_t lse_stride = params.lse_stride;
  if (num_parts > 1) {
    const int64_t vector = (int64_t{row} * num_parts + blockIdx.y) * params.num_heads + first_head;
    target = {args.parts.values + vector * kValueDim, kValueDim, nullptr, false};
    lse = args.parts.lse + vector;
    lse_stride = 1;
  }
  if (part.begin >= part.end) {
    StoreNothing(target, num_heads, lse, lse_stride);
    return;
  }
  if (threadIdx.x >= 2 * kWarpgroupThreads) {
    GiveRegisters<104>();
    GatherKeys<kFormat>(shared, args, row, part);
    return;
  }
  if (threadIdx.x >= kWarpgroupThreads) {
    TakeRegisters<176>();
    LoadQueries(shared, params, row, first_head);
    AttendSecond(shared, args, row, part.num_steps(), target, num_heads);
  } else {
    TakeRegisters<224>();
    LoadQueries(shared, params, row, first_head);
    AttendFirst(shared, args, part.end - part.begin, target, num_heads, lse, lse_stride);
  }
}

constexpr int32_t kCombineThreads = kValueDim / 4;

// Grid: heads, rows.
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const __grid_constant__ Args args, int32_t num_parts) {
  WaitForPrevious();
  const SparseDecodeParams& params = args.params;
  const int32_t head = static_cast<int32_t>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const int64_t first = int64_t{row} * num_parts * params.num_heads + head;
  const float* lses = args.parts.lse + first;
  const auto* values =
      reinterpret_cast<const float4*>(args.parts.values + first * kValueDim) + threadIdx.x;
  float max = -INFINITY;
  for (int32_t i = 0; i < num_parts; ++i) max = fmaxf(max, lses[i * params.num_heads]);
  float sum = 0;
  float4 out = make_float4(0, 0, 0, 0);
  for (int32_t i = 0; i < num_parts; ++i) {
    const float part_lse = lses[i * params.num_heads];
    if (part_lse == -INFINITY) continue;
    const float weight = expf(part_lse - max);
    const float4 value = values[int64_t{i} * params.num_heads * kCombineThreads];
    sum += weight;
    out.x = fmaf(weight, value.x, out.x);
    out.y = fmaf(weight, value.y, out.y);
    out.z = fmaf(weight, value.z, out.z);
    out.w = fmaf(weight, value.w, out.w);
  }
  float scale = sum == 0 ? 0.0f : 1.0f / sum;
  if (params.sink != nullptr && sum > 0) scale *= SinkFactor(params.sink[head], max + logf(sum));
  const int32_t column = 4 * static_cast<int32_t>(threadIdx.x);
  if (RotatesBack(args, row, head == 0 && threadIdx.x == 0) && column >= kValueDim - kRope) {
    const int32_t pair = (column - (kValueDim - kRope)) / 2;
    const int32_t position = params.positions[row];
    const float2 first_pair =
        RotateBack(params.inverse_rope, position, pair, make_float2(out.x, out.y));
    const float2 second_pair =
        RotateBack(params.inverse_rope, position, pair + 1, make_float2(out.z, out.w));
    out = make_float4(first_pair.x, first_pair.y, second_pair.x, second_pair.y);
  }
  auto* to = args.values + row * args.row_stride + head * args.head_stride + column;
  *reinterpret_cast<float4*>(to) =
      make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
  if (threadIdx.x == 0 && params.lse != nullptr) {
    params.lse[head * params.lse_stride + row] = sum == 0 ? -INFINITY : max + logf(sum);
  }
}

template <KvFormat kFormat, int32_t kBoxes>
absl::Status RunParts(const Launcher& launcher, const Args& args, int32_t num_parts) {
  const dim3 grid(static_cast<uint32_t>(CeilDiv(args.params.num_heads, kHeads)),
                  static_cast<uint32_t>(num_parts), static_cast<uint32_t>(args.params.num_rows));
  return Launch(launcher, "sparse_decode", SparseLatentKernel<kFormat, kBoxes>,
                {.grid = grid,
                 .threads = kThreads,
                 .shared_bytes = sizeof(Shared<kBoxes>) + kBoxAlignment,
                 .early = true},
                args);
}

absl::Status RunFormat(const Launcher& launcher, const Args& args, int32_t num_parts) {
  const KvFormat format = args.params.sources[0].pages.format;
  if (format == KvFormat::kFp8Latent) {
    return RunParts<KvFormat::kFp8Latent, kLatentBoxes>(launcher, args, num_parts);
  }
  if (format == KvFormat::kFp8SharedKv) {
    return RunParts<KvFormat::kFp8SharedKv, kSharedKvBoxes>(launcher, args, num_parts);
  }
  return args.params.dim == kValueDim
             ? RunParts<KvFormat::kBfloat16, kLatentBoxes>(launcher, args, num_parts)
             : RunParts<KvFormat::kBfloat16, kSharedKvBoxes>(launcher, args, num_parts);
}

// Whether this source's entries can be read 16 bytes at a time; `format` is the first one's.
bool CanGather(const SparseSource& source, KvFormat format) {
  const KvPages& pages = source.pages;
  return source.indices == nullptr ||
         (pages.format == format && pages.block_stride % 16 == 0 &&
          reinterpret_cast<uintptr_t>(pages.base) % 16 == 0 &&
          (format == KvFormat::kFp8SharedKv || pages.entry_bytes % 16 == 0));
}

}  // namespace

bool CanRunSparseLatent(const SparseDecodeParams& params) {
  const auto aligned = [](const float* pointer, int64_t row_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row_stride % 4 == 0 &&
           head_stride % 4 == 0;
  };
  const KvFormat format = params.sources[0].pages.format;
  const bool is_latent =
      params.dim == kValueDim && (format == KvFormat::kFp8Latent || format == KvFormat::kBfloat16);
  const bool is_shared_kv = params.dim == kValueDim - kRope &&
                            (format == KvFormat::kFp8SharedKv || format == KvFormat::kBfloat16);
  const RopeTable& rope = params.inverse_rope;
  return (is_latent || is_shared_kv) && params.rope_dim == kRope && params.value_dim == kValueDim &&
         params.softmax_scale > 0 && params.sources[0].indices != nullptr &&
         CanGather(params.sources[0], format) && CanGather(params.sources[1], format) &&
         (rope.rope_dim == 0 ||
          (rope.rope_dim == kRope && rope.layout == RopeLayout::kInterleaved)) &&
         aligned(params.q, params.q_row_stride, params.q_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride) &&
         aligned(params.out, params.out_row_stride, params.out_head_stride);
}

absl::Status SparseLatent(const Launcher& launcher, const SparseDecodeParams& params,
                          const SparseList& list, const SparseParts& parts, float* values,
                          int64_t row_stride, int64_t head_stride) {
  const auto shift_of = [](int32_t size) {
    return size > 0 && std::has_single_bit(static_cast<uint32_t>(size))
               ? std::countr_zero(static_cast<uint32_t>(size))
               : -1;
  };
  const Args args{
      params,
      list,
      parts,
      values,
      row_stride,
      head_stride,
      launcher.device.fault,
      {shift_of(params.sources[0].pages.block_size), shift_of(params.sources[1].pages.block_size)}};
  const int32_t tiles = CeilDiv(params.num_heads, kHeads) * params.num_rows;
  const int32_t num_parts = std::max(
      1, std::min(kMaxSparseParts / tiles, static_cast<int32_t>(list.stride) / kMinKeysPerPart));
  RETURN_IF_ERROR(RunFormat(launcher, args, num_parts));
  if (num_parts == 1) return absl::OkStatus();
  return Launch(launcher, "sparse_decode combine", CombineKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_heads),
                              static_cast<uint32_t>(params.num_rows)),
                 .threads = kCombineThreads,
                 .early = true},
                args, num_parts);
}

}  // namespace kernels::cuda

#include "kernels/cuda/flash_mha.h"

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kNope = 128;
constexpr int32_t kRope = 64;
constexpr int32_t kValue = 128;
constexpr int32_t kKeyBoxes = (kNope + kRope) / kBoxColumns;  // along a key
constexpr int32_t kValueBoxes = kValue / kBoxColumns;
constexpr int32_t kKeys = kProductColumns;               // of a step
constexpr int32_t kBlockElements = kKeys * kBoxColumns;  // 64 columns of a step's keys
constexpr int32_t kStages = 2;
constexpr int32_t kWarps = 8;                             // that multiply
constexpr int32_t kFlashThreads = 3 * kWarpgroupThreads;  // the third warpgroup copies
constexpr float kLog2E = 1.44269504f;

struct FlashShared {
  uint16_t q[2][kKeyBoxes][kBoxElements];  // of either warpgroup
  uint16_t k[kStages][kKeyBoxes][kBlockElements];
  uint16_t v[kStages][kValueBoxes][kBlockElements];
  Barrier full_k[kStages], full_v[kStages];
  Barrier empty_k[kStages], empty_v[kStages];
};
constexpr size_t kBoxAlignment = 1024;  // bytes

struct FlashArgs {
  CUtensorMap k_nope = {};
  CUtensorMap k_rope = {};
  CUtensorMap v = {};
  RaggedMhaParams mha;
};

// One thread's work: the boxes of every step, in the order in which they are used.
__device__ void CopySteps(FlashShared& shared, const FlashArgs& args, const FlashTile& tile,
                          int32_t head, int32_t num_steps) {
  constexpr uint32_t kKeyBytes = kKeyBoxes * kBlockElements * sizeof(uint16_t);
  constexpr uint32_t kValueBytes = kValueBoxes * kBlockElements * sizeof(uint16_t);
  const auto nope_column = static_cast<int32_t>(head * args.mha.k_nope_head_stride);
  const auto value_column = static_cast<int32_t>(head * args.mha.v_head_stride);
  RingPosition<kStages> at;
  for (int32_t step = 0; step < num_steps; ++step, at.Advance()) {
    const int32_t row = static_cast<int32_t>(tile.kv_begin) + step * kKeys;
    Barrier* full = &shared.full_k[at.stage];
    WaitFor(&shared.empty_k[at.stage], at.parity ^ 1);
    ArriveAndExpect(full, kKeyBytes);
    for (int32_t half = 0; half < 2; ++half) {
      for (int32_t box = 0; box < kKeyBoxes; ++box) {
        uint16_t* to = shared.k[at.stage][box] + half * kBoxElements;
        const int32_t column = box * kBoxColumns;
        if (column < kNope) {
          CopyBox(to, &args.k_nope, full, nope_column + column, row + half * kBoxRows);
        } else {
          CopyBox(to, &args.k_rope, full, column - kNope, row + half * kBoxRows);
        }
      }
    }
    full = &shared.full_v[at.stage];
    WaitFor(&shared.empty_v[at.stage], at.parity ^ 1);
    ArriveAndExpect(full, kValueBytes);
    for (int32_t half = 0; half < 2; ++half) {
      for (int32_t box = 0; box < kValueBoxes; ++box) {
        CopyBox(shared.v[at.stage][box] + half * kBoxElements, &args.v, full,
                value_column + box * kBoxColumns, row + half * kBoxRows);
      }
    }
  }
}

__device__ void SyncWarpgroup(int32_t warpgroup) {
  asm volatile("bar.sync %0, %1;" : : "r"(warpgroup + 1), "n"(kWarpgroupThreads) : "memory");
}

// The warpgroups issue their products in turns, so that one's run while the other weighs scores.
__device__ void TakeTurn(int32_t warpgroup) {
  asm volatile("bar.sync %0, %1;" : : "r"(warpgroup + 3), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ void PassTurn(int32_t warpgroup) {
  asm volatile("bar.arrive %0, %1;"
               :
               : "r"((warpgroup ^ 1) + 3), "n"(2 * kWarpgroupThreads)
               : "memory");
}

// The warpgroup's 64 query rows, rounded, where the copy engine would have put them.
__device__ void LoadQueries(const RaggedMhaParams& params, const FlashTile& tile, int32_t head,
                            int32_t warpgroup, uint16_t (&q)[kKeyBoxes][kBoxElements]) {
  constexpr int32_t kChunks = kBoxColumns / 8;  // 16 bytes each, of a row of a box
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  const int32_t chunk = thread % kChunks;
  constexpr int32_t kRowsAtATime = kWarpgroupThreads / kChunks;
  constexpr int32_t kPasses = kProductRows / kRowsAtATime;
  // All of them are under way before the first is stored.
  float4 values[kKeyBoxes][kPasses][2];
#pragma unroll
  for (int32_t box = 0; box < kKeyBoxes; ++box) {
    const int32_t d = box * kBoxColumns + chunk * 8;
    const bool is_nope = box * kBoxColumns < kNope;
    const float* from = is_nope ? params.q_nope + head * params.q_nope_head_stride + d
                                : params.q_rope + head * params.q_rope_head_stride + d - kNope;
    const int64_t row_stride = is_nope ? params.q_nope_row_stride : params.q_rope_row_stride;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t row = warpgroup * kProductRows + pass * kRowsAtATime + thread / kChunks;
      const auto* row_values =
          reinterpret_cast<const float4*>(from + (tile.q_begin + row) * row_stride);
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        values[box][pass][i] = row < tile.num_rows ? row_values[i] : make_float4(0, 0, 0, 0);
      }
    }
  }
#pragma unroll
  for (int32_t box = 0; box < kKeyBoxes; ++box) {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t row = pass * kRowsAtATime + thread / kChunks;
      const float4 a = values[box][pass][0], b = values[box][pass][1];
      *reinterpret_cast<uint4*>(q[box] + row * kBoxColumns + (chunk ^ row % 8) * 8) =
          make_uint4(PackBfloat16(a.x, a.y), PackBfloat16(a.z, a.w), PackBfloat16(b.x, b.y),
                     PackBfloat16(b.z, b.w));
    }
  }
  PublishShared();
  SyncWarpgroup(warpgroup);
}

// Values of keys [count, kKeys) become zeros for this warpgroup's products.
__device__ void ClearValues(uint16_t (&v)[kValueBoxes][kBlockElements], int32_t count,
                            int32_t warpgroup) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  for (int32_t box = 0; box < kValueBoxes; ++box) {
    for (int32_t i = count * kBoxColumns + 8 * thread; i < kBlockElements;
         i += 8 * kWarpgroupThreads) {
      *reinterpret_cast<uint4*>(v[box] + i) = make_uint4(0, 0, 0, 0);
    }
  }
  PublishShared();
  SyncWarpgroup(warpgroup);
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
__device__ void Weigh(float (&scores)[kProductSums], float scale_log2, RowState& state,
                      float (&shrink)[2]) {
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

// Weights as the left operand of 16-key products.
__device__ void RoundWeights(const float (&weights)[kProductSums],
                             uint32_t (&rounded)[kKeys / kProductDepth][4]) {
#pragma unroll
  for (int32_t k = 0; k < kKeys / kProductDepth; ++k) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      rounded[k][i] = PackBfloat16(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
    }
  }
}

__device__ void BeginScores(const FlashShared& shared, int32_t warpgroup, int32_t stage,
                            float (&scores)[kProductSums]) {
  KeepSums(scores);
  BeginProducts();
#pragma unroll
  for (int32_t d = 0; d < kNope + kRope; d += kProductDepth) {
    const int32_t box = d / kBoxColumns, within = d % kBoxColumns;
    Multiply(scores, DescribeRows(shared.q[warpgroup][box] + within),
             DescribeRows(shared.k[stage][box] + within), d > 0);
  }
  CommitProducts();
}

__device__ void BeginValues(const FlashShared& shared, int32_t stage,
                            uint32_t (&weights)[kKeys / kProductDepth][4],
                            float (&out)[kProductSums]) {
  KeepSums(out);
  BeginProducts();
#pragma unroll
  for (int32_t k = 0; k < kKeys / kProductDepth; ++k) {
    MultiplyColumns(out, weights[k],
                    DescribeColumns(shared.v[stage][0] + k * kProductDepth * kBoxColumns,
                                    kBlockElements * sizeof(uint16_t)));
  }
  CommitProducts();
}

// Stores the warpgroup's rows, or merges them with what is there.
__device__ void StoreRows(const RaggedMhaParams& params, const FlashTile& tile, int32_t head,
                          const RowState& state, const float (&out)[kProductSums]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const int32_t row_of_tile = 16 * warp + lane / 4 + 8 * i;
    const bool in_tile = row_of_tile < tile.num_rows;
    const int64_t row = tile.q_begin + row_of_tile;
    float* lse =
        params.lse == nullptr || !in_tile ? nullptr : params.lse + head * params.lse_stride + row;
    const float old_lse = params.accumulate && in_tile ? *lse : -INFINITY;
    __syncwarp();  // all of a row's lanes have read the old lse
    if (!in_tile) continue;
    const bool blind = sum == 0;
    const float part_lse = blind ? -INFINITY : fmaf(state.max[i], params.softmax_scale, logf(sum));
    if (params.accumulate && part_lse == -INFINITY) continue;
    float scale = blind ? 0.0f : 1.0f / sum, keep = 0, new_lse = part_lse;
    if (old_lse != -INFINITY) {
      const MergeWeights weights = WeighByLse(part_lse, old_lse);
      scale *= weights.part;
      keep = weights.other;
      new_lse = weights.lse;
    }
    float* to = params.out + row * params.out_row_stride + head * params.out_head_stride;
#pragma unroll
    for (int32_t j = 0; j < kValue / 8; ++j) {
      auto* pair = reinterpret_cast<float2*>(to + 8 * j + 2 * (lane % 4));
      float2 value = make_float2(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
      if (keep != 0) {
        const float2 old = *pair;
        value = make_float2(fmaf(keep, old.x, value.x), fmaf(keep, old.y, value.y));
      }
      *pair = value;
    }
    if (lane % 4 == 0 && lse != nullptr) *lse = new_lse;
  }
}

__device__ void AttendRows(FlashShared& shared, const RaggedMhaParams& params,
                           const FlashTile& tile, int32_t head, int32_t num_steps) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t warpgroup = warp / 4;
  const float scale_log2 = params.softmax_scale * kLog2E;
  RowState state;
  float out[kProductSums] = {};
  if (num_steps > 0) {
    LoadQueries(params, tile, head, warpgroup, shared.q[warpgroup]);
    float scores[kProductSums], shrink[2];
    uint32_t weights[kKeys / kProductDepth][4];
    const auto mask = [&](int32_t step) {
      // Keys that the tile's first row sees are seen by all.
      if (tile.offset + 1 >= (step + 1) * kKeys && tile.kv_len >= (step + 1) * kKeys) return;
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t row = 16 * warp + lane / 4 + 8 * i;
        const int64_t seen = min(tile.offset + row + 1, tile.kv_len) - int64_t{step} * kKeys;
        const int32_t count = static_cast<int32_t>(min(max(seen, int64_t{0}), int64_t{kKeys}));
#pragma unroll
        for (int32_t j = 0; j < kKeys / 8; ++j) {
#pragma unroll
          for (int32_t c = 0; c < 2; ++c) {
            if (8 * j + 2 * (lane % 4) + c >= count) scores[4 * j + 2 * i + c] = -INFINITY;
          }
        }
      }
    };
    // The products of this step's scores run beside those of the last step's values.
    RingPosition<kStages> k_at, v_at;
    WaitFor(&shared.full_k[0], 0);
    if (warpgroup == 1) PassTurn(warpgroup);  // the first warpgroup begins
    TakeTurn(warpgroup);
    BeginScores(shared, warpgroup, 0, scores);
    if (warpgroup == 0 || num_steps > 1) PassTurn(warpgroup);
    WaitForProducts<0>();
    KeepSums(scores);
    if (lane == 0) Arrive(&shared.empty_k[0]);
    k_at.Advance();
    mask(0);
    Weigh(scores, scale_log2, state, shrink);
    RoundWeights(scores, weights);
    for (int32_t step = 1; step < num_steps; ++step, k_at.Advance(), v_at.Advance()) {
      WaitFor(&shared.full_k[k_at.stage], k_at.parity);
      TakeTurn(warpgroup);
      BeginScores(shared, warpgroup, k_at.stage, scores);
      WaitFor(&shared.full_v[v_at.stage], v_at.parity);
      BeginValues(shared, v_at.stage, weights, out);
      if (warpgroup == 0 || step + 1 < num_steps) PassTurn(warpgroup);
      WaitForProducts<1>();
      KeepSums(scores);
      if (lane == 0) Arrive(&shared.empty_k[k_at.stage]);
      mask(step);
      Weigh(scores, scale_log2, state, shrink);
      WaitForProducts<0>();
      KeepSums(out);
      if (lane == 0) Arrive(&shared.empty_v[v_at.stage]);
#pragma unroll
      for (int32_t j = 0; j < kProductSums; ++j) out[j] *= shrink[j / 2 % 2];
      RoundWeights(scores, weights);
    }
    WaitFor(&shared.full_v[v_at.stage], v_at.parity);
    const int64_t left = tile.kv_len - int64_t{num_steps - 1} * kKeys;
    if (left < kKeys) ClearValues(shared.v[v_at.stage], static_cast<int32_t>(left), warpgroup);
    BeginValues(shared, v_at.stage, weights, out);
    WaitForProducts<0>();
    KeepSums(out);
  }
  StoreRows(params, tile, head, state, out);
}

// Grid: heads, tiles.
__global__ void __launch_bounds__(kFlashThreads, 1)
    FlashMhaKernel(const __grid_constant__ FlashArgs args) {
  const auto address = reinterpret_cast<uintptr_t>(DynamicShared());
  auto& shared = *reinterpret_cast<FlashShared*>((address + kBoxAlignment - 1) / kBoxAlignment *
                                                 kBoxAlignment);
  const FlashTile tile = FindFlashTile(args.mha, static_cast<int32_t>(blockIdx.y));
  if (tile.seq < 0) return;
  const int32_t head = static_cast<int32_t>(blockIdx.x);
  const auto num_steps = static_cast<int32_t>(CeilDiv(tile.num_keys, int64_t{kKeys}));
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < kStages; ++s) {
      InitBarrier(&shared.full_k[s], 1);
      InitBarrier(&shared.full_v[s], 1);
      InitBarrier(&shared.empty_k[s], kWarps);
      InitBarrier(&shared.empty_v[s], kWarps);
    }
    PublishBarriers();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroupThreads) {
    GiveRegisters<24>();
    if (threadIdx.x == 2 * kWarpgroupThreads) CopySteps(shared, args, tile, head, num_steps);
  } else {
    TakeRegisters<240>();
    AttendRows(shared, args.mha, tile, head, num_steps);
  }
}

// The heads of k_nope or v as one matrix.
MatrixShape HeadsOf(const RaggedMhaParams& params, const void* data, int64_t row_stride,
                    int64_t head_stride, int64_t columns) {
  return {data, params.num_keys, (params.num_heads - 1) * head_stride + columns, row_stride};
}
MatrixShape NopeKeys(const RaggedMhaParams& params) {
  return HeadsOf(params, params.k_nope, params.k_nope_row_stride, params.k_nope_head_stride, kNope);
}
MatrixShape RopeKeys(const RaggedMhaParams& params) {
  return {params.k_rope, params.num_keys, kRope, params.k_rope_row_stride};
}
MatrixShape Values(const RaggedMhaParams& params) {
  return HeadsOf(params, params.v, params.v_row_stride, params.v_head_stride, kValue);
}

}  // namespace

bool CanRunFlashMha(const RaggedMhaParams& params) {
  const auto aligned = [](const float* pointer, int64_t row_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row_stride % 4 == 0 &&
           head_stride % 4 == 0;
  };
  return params.kv_dtype == DType::kBfloat16 && params.qk_nope_head_dim == kNope &&
         params.qk_rope_head_dim == kRope && params.v_head_dim == kValue &&
         params.softmax_scale > 0 && CanMap(NopeKeys(params)) && CanMap(RopeKeys(params)) &&
         CanMap(Values(params)) &&
         aligned(params.q_nope, params.q_nope_row_stride, params.q_nope_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride) &&
         aligned(params.out, params.out_row_stride, params.out_head_stride);
}

absl::Status FlashMha(const Launcher& launcher, const RaggedMhaParams& params) {
  FlashArgs args;
  args.mha = params;
  ASSIGN_OR_RETURN(args.k_nope, MakeTensorMap(NopeKeys(params)));
  ASSIGN_OR_RETURN(args.k_rope, MakeTensorMap(RopeKeys(params)));
  ASSIGN_OR_RETURN(args.v, MakeTensorMap(Values(params)));
  // Every sequence may end with a tile that is not full.
  const int32_t max_tiles = CeilDiv(params.num_rows, kFlashRows) + params.num_seqs;
  return Launch(
      launcher, "flash_mha", FlashMhaKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_heads), static_cast<uint32_t>(max_tiles)),
       .threads = kFlashThreads,
       .shared_bytes = sizeof(FlashShared) + kBoxAlignment},
      args);
}

}  // namespace kernels::cuda

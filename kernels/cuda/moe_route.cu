#include <algorithm>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tile_product.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kPrefetched = 8;  // loads of a lane before the row is known

// Which experts have rows, and which; the work of one block, after all rows.  Shared memory: ids
// [pairs], count [num_experts], active [num_experts].
__device__ void ListActive(const MoeStreamArgs& args, int32_t* ids, int32_t* count,
                           int32_t* active) {
  const MoeStreamWorkspace& work = args.work;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_experts = args.num_experts;
  const int32_t num_pairs = args.num_rows * args.top_k;
  for (int32_t e = threadIdx.x; e < num_experts; e += kThreads) count[e] = 0;
  __syncthreads();
  for (int32_t p = threadIdx.x; p < num_pairs; p += kThreads) {
    ids[p] = *static_cast<const volatile int32_t*>(&work.ids[p]);  // of other blocks
    atomicAdd(&count[ids[p]], 1);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  // An expert's place among the active ones is the number of those before it.
  int32_t num_active = 0;
  for (int32_t begin = 0; begin < num_experts; begin += kWarpSize) {
    const int32_t expert = begin + lane;
    const int32_t rows = expert < num_experts ? count[expert] : 0;
    const uint32_t lanes = __ballot_sync(kFullWarp, rows > 0);
    if (rows > 0) {
      active[expert] = num_active + __popc(lanes & ((1u << lane) - 1));
      work.active[active[expert]] = {args.experts.routed[expert], rows};
      count[expert] = 0;  // from here on, of the pairs that have their place
    }
    num_active += __popc(lanes);
  }
  for (int32_t a = num_active + lane; a < args.bound; a += kWarpSize) work.active[a].count = 0;
  __syncwarp();
  for (int32_t begin = 0; begin < num_pairs; begin += kWarpSize) {
    const int32_t pair = begin + lane;
    const int32_t expert = pair < num_pairs ? ids[pair] : -1;
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    const int32_t before = __popc(same & ((1u << lane) - 1));
    if (expert >= 0) {
      work.active_pairs[int64_t{active[expert]} * args.num_rows + count[expert] + before] = pair;
    }
    __syncwarp();
    if (expert >= 0 && before == 0) count[expert] += __popc(same);
    __syncwarp();
  }
}

// This block's rows of the gate's matrix: a warp an expert.
class GateRow {
 public:
  __device__ GateRow(const MatrixStack& gate, int64_t hidden, int32_t expert)
      : gate_(gate), hidden_(hidden), expert_(expert) {
    const StoredMatrix& matrix = gate.parts[0];
    streams_ = matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr && hidden % 8 == 0;
    if (!streams_) return;
    const int64_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    row_ = static_cast<const uint16_t*>(matrix.data) + expert * hidden + 8 * lane;
#pragma unroll
    for (int32_t i = 0; i < kPrefetched; ++i) {
      const int64_t k = int64_t{i} * 8 * kWarpSize;
      if (8 * lane + k < hidden) ahead_[i] = LoadStreaming(row_ + k);
    }
  }

  // The logit, in every lane of the warp.
  __device__ float Multiply(const float* x) const {
    const int64_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    float sum = 0;
    if (!streams_) {
      for (int64_t k = lane; k < hidden_; k += kWarpSize) {
        sum = fmaf(x[k], LoadWeight(gate_, expert_, k), sum);
      }
      return WarpSum(sum);
    }
#pragma unroll
    for (int32_t i = 0; i < kPrefetched; ++i) {
      const int64_t k = int64_t{i} * 8 * kWarpSize + 8 * lane;
      if (k < hidden_) sum = Add(ahead_[i], x + k, sum);
    }
    for (int64_t k = int64_t{kPrefetched} * 8 * kWarpSize; k + 8 * lane < hidden_;
         k += 8 * kWarpSize) {
      sum = Add(LoadStreaming(row_ + k), x + k + 8 * lane, sum);
    }
    return WarpSum(sum);
  }

 private:
  static __device__ float Add(const Words4& w, const float* x, float sum) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(x + 2 * j);
      sum = fmaf(v.x, __uint_as_float(words[j] << 16), sum);
      sum = fmaf(v.y, __uint_as_float(words[j] & 0xffff0000u), sum);
    }
    return sum;
  }

  const MatrixStack& gate_;
  const int64_t hidden_;
  const int64_t expert_;
  bool streams_;
  const uint16_t* row_ = nullptr;
  Words4 ahead_[kPrefetched];
};

// True in the block that finishes last of `count`; it sees what the others wrote.  `ticket` counts
// them and is left zero.
__device__ bool IsLast(uint32_t* ticket, uint32_t count, bool& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared = atomicAdd(ticket, 1u) == count - 1;
    if (shared) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return shared;
}

// Grid: rows, groups of kWarps experts.  A row's last block chooses its experts, and the last of
// these lists what all rows chose.  Shared: the normed row, or the lists.
__global__ void __launch_bounds__(kThreads)
    RouteKernel(const __grid_constant__ MoeParams params,
                const __grid_constant__ MatrixStack gate_weight,
                const __grid_constant__ MoeStreamArgs args, uint32_t* tickets) {
  __shared__ float scratch[33];
  __shared__ alignas(16) std::byte choosing[RowShared::Bytes(kMaxExperts)];
  __shared__ bool is_last;
  const MoeStreamWorkspace& work = args.work;
  const int64_t hidden = args.experts.hidden_size;
  auto* x = reinterpret_cast<float*>(DynamicShared());
  const int64_t row = blockIdx.x;
  const int32_t expert = static_cast<int32_t>(blockIdx.y * kWarps + threadIdx.x / kWarpSize);
  const GateRow gate(gate_weight, hidden, min(expert, args.num_experts - 1));
  WaitForPrevious();
  const float* input = params.input + row * params.input_row_stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    x[i] = input[i];
    sum = fmaf(x[i], x[i], sum);
  }
  sum = BlockSum(sum, scratch);
  const float inverse = __frcp_rn(__fsqrt_rn(sum / static_cast<float>(hidden) + params.norm_eps));
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    x[i] = x[i] * inverse * params.norm_weight[i];
    if (blockIdx.y == 0) {
      work.normed[row * hidden + ActivationPlace(RoutedFormat(args.experts.formats), i)] =
          static_cast<uint16_t>(PackBfloat16(x[i], 0));
    }
  }
  __syncthreads();
  const float logit = gate.Multiply(x);
  float* logits = work.logits + row * args.num_experts;
  if (threadIdx.x % kWarpSize == 0 && expert < args.num_experts) logits[expert] = logit;
  if (!IsLast(&tickets[1 + row], gridDim.y, is_last)) return;

  const int32_t top_k = args.top_k;
  int32_t* ids = work.ids + row * top_k;
  for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) {
    x[e] = *static_cast<const volatile float*>(&logits[e]);  // of other blocks
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const RowShared shared(choosing, 0, args.num_experts);
    ChooseExperts(params, row, x, shared, work.ids, work.weights);
    for (int32_t i = threadIdx.x; i < top_k; i += kWarpSize) {
      if (args.num_rows == 1) {
        work.active[i] = {args.experts.routed[ids[i]], 1};
        work.active_pairs[i] = i;
      }
    }
  }
  if (args.num_rows == 1) return;
  if (!IsLast(&tickets[0], gridDim.x, is_last)) return;
  auto* list = reinterpret_cast<int32_t*>(DynamicShared());
  int32_t* count = list + args.num_rows * top_k;
  ListActive(args, list, count, count + args.num_experts);
}

}  // namespace

absl::Status RouteRows(const Launcher& launcher, const MoeParams& params,
                       const MatrixStack& gate_weight, const MoeStreamArgs& args) {
  static_assert(kMaxStreamTokens < kMaxTickets);
  const int64_t words = std::max({args.experts.hidden_size, int64_t{args.num_experts},
                                  int64_t{args.num_rows} * args.top_k + 2 * args.num_experts});
  const auto groups = static_cast<uint32_t>(CeilDiv(args.num_experts, kWarps));
  return Launch(launcher, "moe route", RouteKernel,
                {.grid = dim3(static_cast<uint32_t>(args.num_rows), groups),
                 .threads = kThreads,
                 .shared_bytes = sizeof(float) * static_cast<size_t>(words),
                 .early = true},
                params, gate_weight, args, launcher.device.tickets);
}

}  // namespace kernels::cuda

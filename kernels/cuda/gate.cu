#include "kernels/cuda/gate.h"

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kSortThreads = 512;
constexpr int32_t kRowsPerBlock = kThreads / kWarpSize;

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    SelectKernel(MoeParams params, const float* logits, ExpertChoice choice) {
  const GateConfig& gate = params.gate;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const RowShared shared(DynamicShared(), warp, gate.num_experts);
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + warp;
  if (row >= choice.num_rows) return;
  ChooseExperts(params, row, logits + row * gate.num_experts, shared, choice.ids, choice.weights);
}

// A block an expert: its pairs get slots in the order of their rows, after those of lower experts.
// A warp takes consecutive pairs, its lanes neighbours.
__global__ void __launch_bounds__(kSortThreads) SortKernel(ExpertChoice choice) {
  constexpr int32_t kSortWarps = kSortThreads / kWarpSize;
  __shared__ int32_t scratch[33];
  __shared__ int32_t warp_ours[kSortWarps];
  WaitForPrevious();
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_pairs = choice.num_slots();
  const int32_t share = CeilDiv(num_pairs, kSortThreads) * kWarpSize;
  const int32_t begin = min(warp * share, num_pairs), end = min(begin + share, num_pairs);
  int32_t lower = 0, ours = 0;
#pragma unroll 8
  for (int32_t pair = begin + lane; pair < end; pair += kWarpSize) {
    const int32_t id = choice.ids[pair];
    lower += id < expert ? 1 : 0;
    ours += id == expert ? 1 : 0;
  }
  ours = WarpSum(ours);
  if (lane == 0) warp_ours[warp] = ours;
  int32_t slot = BlockSum(lower, scratch);  // a barrier as well
  int32_t count = 0;
  for (int32_t w = 0; w < kSortWarps; ++w) {
    if (w < warp) slot += warp_ours[w];
    count += warp_ours[w];
  }
  if (threadIdx.x == 0) choice.count[expert] = count;
  if (ours == 0) return;
#pragma unroll 4
  for (int32_t first = begin; first < end; first += kWarpSize) {
    const int32_t pair = first + lane;
    const bool is_ours = pair < end && choice.ids[pair] == expert;
    const uint32_t lanes = __ballot_sync(kFullWarp, is_ours);
    if (is_ours) {
      const int32_t at = slot + __popc(lanes & ((1u << lane) - 1));
      choice.slot_row[at] = pair / choice.top_k;
      choice.slot_of_pair[pair] = at;
    }
    slot += __popc(lanes);
  }
}

}  // namespace

absl::Status SelectExperts(const Launcher& launcher, const MoeParams& params, const float* logits,
                           const ExpertChoice& choice) {
  return Launch(launcher, "moe gate", SelectKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(choice.num_rows, kRowsPerBlock))),
                 .threads = kThreads,
                 .shared_bytes = RowShared::Bytes(params.gate.num_experts) * kRowsPerBlock},
                params, logits, choice);
}

absl::Status SortByExpert(const Launcher& launcher, const ExpertChoice& choice) {
  return Launch(launcher, "moe sort", SortKernel,
                {.grid = dim3(static_cast<uint32_t>(choice.num_experts)),
                 .threads = kSortThreads,
                 .early = true},
                choice);
}

}  // namespace kernels::cuda

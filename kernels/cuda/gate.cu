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
// A thread takes consecutive pairs.
__global__ void __launch_bounds__(kSortThreads) SortKernel(ExpertChoice choice) {
  __shared__ int32_t scratch[33];
  __shared__ int32_t warp_ours[kSortThreads / kWarpSize];
  WaitForPrevious();
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int32_t num_pairs = choice.num_slots();
  const int32_t share = CeilDiv(num_pairs, kSortThreads);
  const int32_t begin = min(thread * share, num_pairs), end = min(begin + share, num_pairs);
  int32_t lower = 0, ours = 0;
#pragma unroll 4
  for (int32_t pair = begin; pair < end; ++pair) {
    const int32_t id = choice.ids[pair];
    lower += id < expert ? 1 : 0;
    ours += id == expert ? 1 : 0;
  }
  int32_t up_to = ours;  // of this warp's threads up to this one
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const int32_t more = __shfl_up_sync(kFullWarp, up_to, offset);
    if (lane >= offset) up_to += more;
  }
  if (lane == kWarpSize - 1) warp_ours[warp] = up_to;
  const int32_t first = BlockSum(lower, scratch);  // a barrier as well
  int32_t slot = first + up_to - ours, count = 0;
  for (int32_t w = 0; w < kSortThreads / kWarpSize; ++w) {
    if (w < warp) slot += warp_ours[w];
    count += warp_ours[w];
  }
  if (thread == 0) choice.count[expert] = count;
  for (int32_t pair = begin; ours > 0 && pair < end; ++pair) {
    if (choice.ids[pair] != expert) continue;
    choice.slot_row[slot] = pair / choice.top_k;
    choice.slot_of_pair[pair] = slot++;
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

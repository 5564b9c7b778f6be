#include "kernels/cuda/gate.h"

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "status/status_macros.h"

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
  RowShared& shared = reinterpret_cast<RowShared*>(DynamicShared())[warp];
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + warp;
  if (row >= choice.num_rows) return;
  SelectRow(params, row, logits + row * gate.num_experts, shared, choice.ids + row * gate.top_k,
            choice.weights + row * gate.top_k);
}

// A block an expert: its pairs get slots in the order of their rows, after those of lower experts.
__global__ void __launch_bounds__(kSortThreads) SortKernel(ExpertChoice choice) {
  __shared__ int32_t scratch[33];
  __shared__ int32_t warp_counts[kSortThreads / kWarpSize];
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t num_pairs = choice.num_slots();
  int32_t before = 0;
  for (int32_t i = threadIdx.x; i < num_pairs; i += kSortThreads) {
    before += choice.ids[i] < expert ? 1 : 0;
  }
  const int32_t first = BlockSum(before, scratch);
  int32_t next = first;
  for (int32_t begin = 0; begin < num_pairs; begin += kSortThreads) {
    const int32_t pair = begin + static_cast<int32_t>(threadIdx.x);
    const bool ours = pair < num_pairs && choice.ids[pair] == expert;
    const uint32_t lanes = __ballot_sync(kFullWarp, ours);
    if (lane == 0) warp_counts[warp] = __popc(lanes);
    __syncthreads();
    int32_t slot = next + __popc(lanes & ((1u << lane) - 1));
    for (int32_t w = 0; w < kSortThreads / kWarpSize; ++w) {
      if (w < warp) slot += warp_counts[w];
      next += warp_counts[w];
    }
    if (ours) {
      choice.slot_row[slot] = pair / choice.top_k;
      choice.slot_of_pair[pair] = slot;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) choice.count[expert] = next - first;
}

}  // namespace

absl::Status SelectExperts(const Launcher& launcher, const MoeParams& params, const float* logits,
                           const ExpertChoice& choice) {
  return Launch(launcher, "moe gate", SelectKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(choice.num_rows, kRowsPerBlock))),
                 .threads = kThreads,
                 .shared_bytes = sizeof(RowShared) * kRowsPerBlock},
                params, logits, choice);
}

absl::Status CopyChoice(const Launcher& launcher, const MoeParams& params,
                        const ExpertChoice& choice) {
  const auto copy = [&](auto* to, const auto* from) {
    if (to == nullptr) return cudaSuccess;
    return cudaMemcpyAsync(to, from, sizeof(*to) * static_cast<size_t>(choice.num_slots()),
                           cudaMemcpyDeviceToDevice, launcher.stream);
  };
  RETURN_IF_ERROR(ToStatus(copy(params.topk_ids, choice.ids), "moe: copying topk_ids"));
  return ToStatus(copy(params.topk_weights, choice.weights), "moe: copying topk_weights");
}

absl::Status SortByExpert(const Launcher& launcher, const ExpertChoice& choice) {
  return Launch(launcher, "moe sort", SortKernel,
                {.grid = dim3(static_cast<uint32_t>(choice.num_experts)), .threads = kSortThreads},
                choice);
}

}  // namespace kernels::cuda

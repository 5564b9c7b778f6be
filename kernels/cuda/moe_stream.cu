#include "kernels/cuda/moe_stream.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/weight_stream.cuh"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

int64_t LayOut(std::byte* base, int64_t rows, const GateConfig& gate, int64_t hidden,
               int64_t intermediate, int64_t shared_intermediate, MoeStreamWorkspace& work) {
  ScratchCarver carver(base);
  const int64_t pairs = rows * gate.top_k;
  const int64_t bound = std::min<int64_t>(pairs, gate.num_experts);
  carver.Take(work.normed, rows * hidden);
  carver.Take(work.logits, rows * gate.num_experts);
  carver.Take(work.ids, pairs);
  carver.Take(work.weights, pairs);
  carver.Take(work.active, bound);
  carver.Take(work.active_pairs, bound * rows);
  carver.Take(work.activated, pairs * intermediate);
  carver.Take(work.shared_activated, rows * shared_intermediate);
  return carver.size();
}

MoeStreamArgs MakeArgs(const MoeParams& params, const StreamExperts& experts) {
  return {.experts = experts,
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
}

}  // namespace

bool CanStreamMoe(const MoeParams& params, const StreamExperts& experts,
                  const MatrixStack& gate_weight) {
  if (experts.routed == nullptr || params.num_rows > kMaxStreamTokens ||
      !CanRoute(params, gate_weight)) {
    return false;
  }
  const int32_t routed_step = StepDepthOf(RoutedFormat(experts.formats));
  const int32_t shared_step = StepDepthOf(SharedFormat(experts.formats));
  if (experts.hidden_size % routed_step != 0 || experts.intermediate_size % routed_step != 0 ||
      (experts.num_shared > 0 && experts.hidden_size % shared_step != 0)) {
    return false;
  }
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    if (experts.shared_intermediate[s] % shared_step != 0) return false;
  }
  const MoeStreamArgs args = MakeArgs(params, experts);
  return std::max({RouteSharedBytes(args), GateUpSharedBytes(args), DownSharedBytes(args)}) <=
         kMaxSharedBytes;
}

int64_t StreamMoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                                int64_t moe_intermediate_size, int64_t shared_intermediate_size) {
  MoeStreamWorkspace work;
  return LayOut(nullptr, max_rows < kMaxStreamTokens ? max_rows : kMaxStreamTokens, gate,
                hidden_size, moe_intermediate_size, shared_intermediate_size, work);
}

absl::Status StreamMoe(const Launcher& launcher, const MoeParams& params,
                       const StreamExperts& experts, const MatrixStack& gate_weight) {
  MoeStreamArgs args = MakeArgs(params, experts);
  int64_t shared_intermediate = 0;
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    shared_intermediate += experts.shared_intermediate[s];
  }
  LayOut(params.workspace, params.num_rows, params.gate, experts.hidden_size,
         experts.intermediate_size, shared_intermediate, args.work);
  RETURN_IF_ERROR(RouteRows(launcher, params, gate_weight, args));
  RETURN_IF_ERROR(StreamGateUp(launcher, args));
  return StreamDown(launcher, args);
}

}  // namespace kernels::cuda

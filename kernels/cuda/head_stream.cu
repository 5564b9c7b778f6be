#include "kernels/cuda/head_stream.h"

#include "kernels/cuda/head_stream.cuh"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {
namespace {

template <int32_t kTiles>
__global__ void __launch_bounds__(kStreamThreads)
    HeadStreamKernel(const __grid_constant__ HeadStreamArgs args) {
  StreamHeadColumns<kTiles>(args, static_cast<int32_t>(blockIdx.x));
}

}  // namespace

bool CanStreamHeads(const HeadLinearParams& params) {
  constexpr int64_t kMaxDepth = 2048;  // of many rows in shared memory
  return params.weight->in_features() % kStepDepth == 0 &&
         params.weight->in_features() <= kMaxDepth && params.input_row_stride % 4 == 0 &&
         params.input_head_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(params.input) % sizeof(float4) == 0;
}

HeadStreamArgs MakeHeadStreamArgs(const HeadLinearParams& params, const uint16_t* weight) {
  return {.weight = weight,
          .num_heads = params.weight->num_heads(),
          .columns = params.weight->out_features(),
          .depth = params.weight->in_features(),
          .num_rows = params.num_rows,
          .input = params.input,
          .input_row_stride = params.input_row_stride,
          .input_head_stride = params.input_head_stride,
          .output = params.output,
          .rounded_output = params.rounded_output,
          .output_row_stride = params.output_row_stride,
          .output_head_stride = params.output_head_stride};
}

absl::Status StreamHeadLinear(const Launcher& launcher, const HeadLinearParams& params,
                              const uint16_t* weight) {
  const HeadStreamArgs args = MakeHeadStreamArgs(params, weight);
  const LaunchShape shape{.grid = dim3(static_cast<uint32_t>(HeadStreamBlocks(args))),
                          .threads = kStreamThreads,
                          .shared_bytes = HeadStreamSharedBytes(args),
                          .early = true};
  const auto kernel = HeadStreamTiles(params.num_rows) == kFewHeadStreamTiles
                          ? HeadStreamKernel<kFewHeadStreamTiles>
                          : HeadStreamKernel<kManyHeadStreamTiles>;
  return Launch(launcher, "head stream", kernel, shape, args);
}

}  // namespace kernels::cuda

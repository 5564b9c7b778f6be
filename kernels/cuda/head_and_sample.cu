#include "kernels/cuda/head_and_sample.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/sampler.h"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kExtraRows = 64;  // of gathered hidden states, for logit rows

// What a workspace holds, in this order.
struct Workspace {
  float* gathered;   // [max_samples + kExtraRows, hidden_size] rows of the hidden state
  float* prepared;   // the same, normed
  float* logits;     // [max_samples, vocab]
  float* penalized;  // [max_samples, vocab]
};

int64_t LayOut(std::byte* base, int64_t num_samples, int64_t hidden_size, int64_t vocab_size,
               Workspace& work) {
  ScratchCarver carver(base);
  carver.Take(work.gathered, (num_samples + kExtraRows) * hidden_size);
  carver.Take(work.prepared, (num_samples + kExtraRows) * hidden_size);
  carver.Take(work.logits, num_samples * vocab_size);
  carver.Take(work.penalized, num_samples * vocab_size);
  return carver.size();
}

// A block a reset.
__global__ void __launch_bounds__(kThreads) ResetKernel(HeadAndSampleParams params) {
  const PenaltyReset reset = params.penalty_resets[blockIdx.x];
  if (reset.slot < 0 || reset.slot >= params.penalties.num_slots || reset.begin < 0) return;
  const int64_t vocab_size = params.vocab_size;
  int32_t* counts = params.penalties.output_counts + reset.slot * vocab_size;
  uint8_t* in_prompt = params.penalties.in_prompt + reset.slot * vocab_size;
  for (int64_t i = threadIdx.x; i < vocab_size; i += kThreads) {
    counts[i] = 0;
    in_prompt[i] = 0;
  }
  __syncthreads();
  const int32_t* tokens = params.history_tokens + reset.begin;
  for (int32_t i = threadIdx.x; i < reset.prompt_len + reset.output_len; i += kThreads) {
    const int32_t token = tokens[i];
    if (token < 0 || token >= vocab_size) continue;
    if (i < reset.prompt_len) {
      in_prompt[token] = 1;
    } else {
      atomicAdd(&counts[token], 1);
    }
  }
}

struct GatherArgs {
  const float* hidden = nullptr;
  int64_t hidden_row_stride = 0;
  int64_t hidden_size = 0;
  const SampleRow* samples = nullptr;  // rows of samples, or
  const int32_t* rows = nullptr;       // these
  float* out = nullptr;                // [rows, hidden_size]
};

// A block a row.
__global__ void __launch_bounds__(kThreads) GatherKernel(GatherArgs args) {
  WaitForPrevious();
  const int64_t row =
      args.samples != nullptr ? args.samples[blockIdx.x].row : args.rows[blockIdx.x];
  const float* from = args.hidden + (row < 0 ? 0 : row) * args.hidden_row_stride;
  float* to = args.out + blockIdx.x * args.hidden_size;
  for (int64_t i = threadIdx.x; i < args.hidden_size; i += kThreads) to[i] = from[i];
}

__global__ void FinishKernel(HeadAndSampleParams params) {
  WaitForPrevious();
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= params.num_samples) return;
  const int32_t token = params.results[i].token_id;
  params.sampled_ids[i] = token == kNoToken ? 0 : token;
  const int64_t slot = params.samples[i].penalty_slot;
  if (token != kNoToken && slot >= 0 && slot < params.penalties.num_slots) {
    atomicAdd(&params.penalties.output_counts[slot * params.vocab_size + token], 1);
  }
}

// logits [num_rows, vocab] of gathered rows.
absl::Status ComputeLogits(const Launcher& launcher, const HeadAndSampleParams& params,
                           GatherArgs gather, int32_t num_rows, const Workspace& work,
                           float* logits) {
  gather.hidden = params.hidden;
  gather.hidden_row_stride = params.hidden_row_stride;
  gather.hidden_size = params.head->in_features();
  gather.out = work.gathered;
  RETURN_IF_ERROR(Launch(
      launcher, "head gather", GatherKernel,
      {.grid = dim3(static_cast<uint32_t>(num_rows)), .threads = kThreads, .early = true}, gather));
  const OutputSegment output{logits, params.vocab_size, params.vocab_size};
  return Linear(launcher, {.weight = params.head,
                           .num_rows = num_rows,
                           .input = {.data = work.gathered, .row_stride = gather.hidden_size},
                           .norm_weight = params.norm_weight,
                           .norm_eps = params.norm_eps,
                           .outputs = absl::MakeConstSpan(&output, 1),
                           .workspace = reinterpret_cast<std::byte*>(work.prepared)});
}

}  // namespace

int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size, int32_t vocab_size) {
  Workspace work;
  return LayOut(nullptr, max_samples, hidden_size, vocab_size, work);
}

absl::Status HeadAndSample(const Launcher& launcher, const HeadAndSampleParams& params) {
  RETURN_IF_ERROR(CheckHeadAndSample(params));
  RETURN_IF_ERROR(
      Launch(launcher, "penalty reset", ResetKernel,
             {.grid = dim3(static_cast<uint32_t>(params.num_penalty_resets)), .threads = kThreads},
             params));
  if (params.num_samples == 0 && params.num_logit_rows == 0) return absl::OkStatus();
  Workspace work;
  LayOut(params.workspace, params.num_samples, params.head->in_features(), params.vocab_size, work);
  const int32_t max_rows = params.num_samples + kExtraRows;
  for (int32_t begin = 0; begin < params.num_logit_rows; begin += max_rows) {
    RETURN_IF_ERROR(ComputeLogits(launcher, params, {.rows = params.logit_rows + begin},
                                  std::min(max_rows, params.num_logit_rows - begin), work,
                                  params.logits + int64_t{begin} * params.vocab_size));
  }
  if (params.num_samples == 0) return absl::OkStatus();
  RETURN_IF_ERROR(ComputeLogits(launcher, params, {.samples = params.samples}, params.num_samples,
                                work, work.logits));
  RETURN_IF_ERROR(SampleTokens(launcher, params, work.logits, work.penalized));
  return Launch(launcher, "finish samples", FinishKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(params.num_samples, kThreads))),
                 .threads = kThreads,
                 .early = true},
                params);
}

}  // namespace kernels::cuda

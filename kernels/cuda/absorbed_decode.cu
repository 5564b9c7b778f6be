#include "kernels/cuda/absorbed_decode.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/latent_decode.h"
#include "kernels/cuda/latent_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/store_kv.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kCombineThreads = 128;

// A "partial" is one row's result over a split; row r's partial of its sequence's split i is number
// r * max_splits_per_seq + i.
struct Workspace {
  float* out;          // [num_rows, num_heads, kv_lora_rank], of the combined rows
  float* partial_out;  // [num_rows * max_splits_per_seq, num_heads, kv_lora_rank]
  float* partial_lse;  // [num_rows * max_splits_per_seq, num_heads]
};

Workspace LayOut(const AbsorbedDecodeParams& params) {
  const int64_t vectors = int64_t{params.num_rows} * params.num_heads;
  Workspace work;
  work.out = reinterpret_cast<float*>(params.workspace);
  work.partial_out = work.out + vectors * params.kv_lora_rank;
  work.partial_lse = work.partial_out + vectors * params.max_splits_per_seq * params.kv_lora_rank;
  return work;
}

// Which of its sequence's splits `split` is.
__device__ int32_t SplitInSequence(const AbsorbedDecodeParams& params, int32_t split) {
  const int32_t seq = params.splits[split].seq;
  int32_t first = split;
  while (first > 0 && params.splits[first - 1].seq == seq) --first;
  return split - first;
}

// Grid: splits, tiles of query vectors.  Vector i of a sequence is its row i / num_heads and head
// i % num_heads.
__global__ void __launch_bounds__(kAttentionThreads)
    SplitKernel(AbsorbedDecodeParams params, Workspace work, Fault* fault) {
  auto& shared = *reinterpret_cast<AttentionShared*>(DynamicShared());
  const DecodeSplit split = params.splits[blockIdx.x];
  if (split.seq < 0 || split.seq >= params.num_seqs) return;
  const int32_t heads = params.num_heads;
  const int32_t rank = params.kv_lora_rank;
  const int64_t q_begin = params.cu_seqlens_q[split.seq];
  const int32_t q_len = params.cu_seqlens_q[split.seq + 1] - params.cu_seqlens_q[split.seq];
  const int64_t first = int64_t{blockIdx.y} * kTileVectors;
  const int64_t num_left = int64_t{q_len} * heads - first;
  if (num_left <= 0) return;
  const int32_t num_vectors =
      num_left < kTileVectors ? static_cast<int32_t>(num_left) : kTileVectors;

  // Row r of the sequence sees keys [0, unseen_end + r).
  const int64_t unseen_end = int64_t{params.kv_len[split.seq]} - q_len + 1;
  if (threadIdx.x < kTileVectors) {
    const int64_t seen = unseen_end + (first + threadIdx.x) / heads;
    shared.num_seen[threadIdx.x] = seen < split.kv_end ? seen : split.kv_end;
  }
  const int64_t last_seen = unseen_end + (first + num_vectors - 1) / heads;
  const int64_t end = last_seen < split.kv_end ? last_seen : split.kv_end;

  const int32_t* blocks = params.block_table + split.seq * params.block_table_stride;
  const KvPages& pages = params.pages;
  const auto load_query = [&](int32_t i, int32_t d) {
    const int64_t row = q_begin + (first + i) / heads, head = (first + i) % heads;
    return d < rank ? params.q_latent[row * params.q_latent_row_stride +
                                      head * params.q_latent_head_stride + d]
                    : params.q_rope[row * params.q_rope_row_stride +
                                    head * params.q_rope_head_stride + d - rank];
  };
  const auto load_key = [&](int64_t j, int32_t d) {
    const int64_t index = j / pages.block_size;
    const int64_t block = index < params.block_table_stride ? blocks[index] : -1;
    if (block < 0) {
      NoteFault(fault, FaultKind::kNoBlock, split.seq, j);
      return 0.0f;
    }
    const std::byte* entry =
        pages.base + block * pages.block_stride + j % pages.block_size * pages.entry_bytes;
    return LoadEntryValue(entry, pages.format, rank, d);
  };
  const AttentionShape shape{rank + params.qk_rope_head_dim, rank, params.softmax_scale};
  AttendKeys(shared, shape, num_vectors, split.kv_begin, end, load_query, load_key, load_key);

  const int32_t vector = static_cast<int32_t>(threadIdx.x) / kThreadsPerVector;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kThreadsPerVector;
  if (vector >= num_vectors) return;
  const int64_t row = q_begin + (first + vector) / heads, head = (first + vector) % heads;
  const int64_t partial =
      row * params.max_splits_per_seq + SplitInSequence(params, static_cast<int32_t>(blockIdx.x));
  const float* acc = Accumulators(shared) + int64_t{vector} * rank;
  const float scale = OutputScale(shared, vector);
  float* out = work.partial_out + (partial * heads + head) * rank;
  for (int32_t d = lane; d < rank; d += kThreadsPerVector) out[d] = acc[d] * scale;
  if (lane == 0) work.partial_lse[partial * heads + head] = LseOf(shared, vector);
}

// The first i in [0, count) that does not come before `value`; `at` ascends.
template <typename At>
__device__ int32_t LowerBound(int32_t count, int32_t value, At at) {
  int32_t begin = 0;
  while (begin < count) {
    const int32_t middle = (begin + count) / 2;
    if (at(middle) < value) {
      begin = middle + 1;
    } else {
      count = middle;
    }
  }
  return begin;
}

// Grid: heads, rows.  Folds a row's partials, one of each split, in their order.
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(AbsorbedDecodeParams params, Workspace work, float* out, int64_t out_row_stride,
                  int64_t out_head_stride) {
  const int64_t head = blockIdx.x;
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const int32_t rank = params.kv_lora_rank;
  const int32_t seq =
      LowerBound(params.num_seqs, row + 1, [&](int32_t i) { return params.cu_seqlens_q[i + 1]; });
  const auto seq_of = [&](int32_t i) { return params.splits[i].seq; };
  const int32_t first = LowerBound(params.num_splits, seq, seq_of);
  const int32_t num_parts = LowerBound(params.num_splits, seq + 1, seq_of) - first;
  const int64_t partial = int64_t{row} * params.max_splits_per_seq;
  const float* parts = work.partial_out + (partial * params.num_heads + head) * rank;
  const float* part_lses = work.partial_lse + partial * params.num_heads + head;
  out += row * out_row_stride + head * out_head_stride;
  float lse = -INFINITY;
  for (int32_t d = threadIdx.x; d < rank; d += kCombineThreads) {
    float sum = 0;
    lse = -INFINITY;
    for (int32_t i = 0; i < num_parts; ++i) {
      const float part_lse = part_lses[int64_t{i} * params.num_heads];
      const float part = parts[int64_t{i} * params.num_heads * rank + d];
      if (part_lse == -INFINITY) continue;
      if (lse == -INFINITY) {
        sum = part;
        lse = part_lse;
        continue;
      }
      const MergeWeights weights = WeighByLse(part_lse, lse);
      sum = weights.other * sum + weights.part * part;
      lse = weights.lse;
    }
    out[d] = sum;
  }
  if (threadIdx.x == 0 && params.lse != nullptr) params.lse[head * params.lse_stride + row] = lse;
}

absl::Status RunSplits(const Launcher& launcher, const AbsorbedDecodeParams& params,
                       const Workspace& work) {
  const size_t shared_bytes = AttentionSharedBytes(params.kv_lora_rank);
  if (shared_bytes > kMaxSharedBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "absorbed_decode: no cuda kernel for a kv_lora_rank of ", params.kv_lora_rank));
  }
  const int64_t vector_tiles =
      CeilDiv(int64_t{params.max_q_len} * params.num_heads, int64_t{kTileVectors});
  return Launch(
      launcher, "absorbed_decode", SplitKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_splits), static_cast<uint32_t>(vector_tiles)),
       .threads = kAttentionThreads,
       .shared_bytes = shared_bytes},
      params, work, launcher.device.fault);
}

}  // namespace

int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                     int32_t num_heads, int32_t kv_lora_rank) {
  const int64_t vectors = int64_t{max_rows} * num_heads;
  const int64_t splits = vectors *
                         ((max_splits_per_seq + 1) * int64_t{kv_lora_rank} + max_splits_per_seq) *
                         static_cast<int64_t>(sizeof(float));
  return std::max(splits, LatentDecodeWorkspaceBytes(max_rows, num_heads));
}

absl::Status AbsorbedDecode(const Launcher& launcher, const AbsorbedDecodeParams& params) {
  RETURN_IF_ERROR(CheckAbsorbedDecode(params));
  if (params.num_seqs == 0 || params.num_rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckLatentFormat(params.pages));
  if (launcher.device.bfloat16 && CanRunLatentDecode(params) && CanCombineLatents(params)) {
    return LatentDecode(launcher, params);
  }
  const Workspace work = LayOut(params);
  RETURN_IF_ERROR(RunSplits(launcher, params, work));
  const bool project = params.w_uv != nullptr;
  const int64_t heads = params.num_heads;
  RETURN_IF_ERROR(
      Launch(launcher, "absorbed_decode combine", CombineKernel,
             {.grid = dim3(static_cast<uint32_t>(heads), static_cast<uint32_t>(params.num_rows)),
              .threads = kCombineThreads},
             params, work, project ? work.out : params.out,
             project ? heads * params.kv_lora_rank : params.out_row_stride,
             project ? params.kv_lora_rank : params.out_head_stride));
  if (!project) return absl::OkStatus();
  return HeadLinear(launcher, {.weight = params.w_uv,
                               .num_rows = params.num_rows,
                               .input = work.out,
                               .input_row_stride = heads * params.kv_lora_rank,
                               .input_head_stride = params.kv_lora_rank,
                               .output = params.out,
                               .rounded_output = params.rounded_out,
                               .output_row_stride = params.out_row_stride,
                               .output_head_stride = params.out_head_stride});
}

}  // namespace kernels::cuda

#include "kernels/cuda/ragged_mha.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/flash_mha.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

// Rows [row_begin, row_begin + num_rows) of a sequence.
struct RowTile {
  int32_t seq = -1;  // -1: there is no such tile
  int32_t row_begin = 0;
  int32_t num_rows = 0;
};

// The sequences' row tiles one after the other.  Every thread gets the same answer.
__device__ RowTile FindRowTile(const RaggedMhaParams& params, int64_t index) {
  for (int32_t seq = 0; seq < params.num_seqs; ++seq) {
    const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
    const int32_t num_tiles = CeilDiv(q_len, kTileVectors);
    if (index < num_tiles) {
      const int32_t begin = static_cast<int32_t>(index) * kTileVectors;
      return {seq, begin, min(kTileVectors, q_len - begin)};
    }
    index -= num_tiles;
  }
  return {};
}

// Grid: heads, row tiles of all sequences.
__global__ void __launch_bounds__(kAttentionThreads) RaggedMhaKernel(RaggedMhaParams params) {
  auto& shared = *reinterpret_cast<AttentionShared*>(DynamicShared());
  const RowTile tile = FindRowTile(params, blockIdx.y);
  if (tile.seq < 0) return;
  const int64_t head = blockIdx.x;
  const int64_t kv_begin = params.cu_seqlens_kv[tile.seq];
  const int64_t kv_len = params.cu_seqlens_kv[tile.seq + 1] - kv_begin;
  const int64_t q_len = params.cu_seqlens_q[tile.seq + 1] - params.cu_seqlens_q[tile.seq];
  const int64_t q_begin = (params.q_row_begin != nullptr ? params.q_row_begin[tile.seq]
                                                         : params.cu_seqlens_q[tile.seq]) +
                          tile.row_begin;
  const int64_t offset =
      params.causal_offset != nullptr ? params.causal_offset[tile.seq] : kv_len - q_len;
  if (threadIdx.x < kTileVectors) {
    shared.num_seen[threadIdx.x] = offset + tile.row_begin + threadIdx.x + 1;
  }
  // What the last row sees.
  const int64_t seen = offset + tile.row_begin + tile.num_rows;
  const int64_t num_keys = seen < 0 ? 0 : seen < kv_len ? seen : kv_len;

  const int32_t nope = params.qk_nope_head_dim;
  const AttentionShape shape{nope + params.qk_rope_head_dim, params.v_head_dim,
                             params.softmax_scale};
  const auto load_query = [&](int32_t i, int32_t d) {
    return d < nope ? params.q_nope[(q_begin + i) * params.q_nope_row_stride +
                                    head * params.q_nope_head_stride + d]
                    : params.q_rope[(q_begin + i) * params.q_rope_row_stride +
                                    head * params.q_rope_head_stride + d - nope];
  };
  const auto load_key = [&](int64_t j, int32_t d) {
    return d < nope ? LoadElement(params.k_nope, params.kv_dtype,
                                  (kv_begin + j) * params.k_nope_row_stride +
                                      head * params.k_nope_head_stride + d)
                    : LoadElement(params.k_rope, params.kv_dtype,
                                  (kv_begin + j) * params.k_rope_row_stride + d - nope);
  };
  const auto load_value = [&](int64_t j, int32_t d) {
    return LoadElement(params.v, params.kv_dtype,
                       (kv_begin + j) * params.v_row_stride + head * params.v_head_stride + d);
  };
  AttendKeys(shared, shape, tile.num_rows, 0, num_keys, load_query, load_key, load_value);

  const int32_t vector = static_cast<int32_t>(threadIdx.x) / kThreadsPerVector;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kThreadsPerVector;
  const bool in_tile = vector < tile.num_rows;
  const int64_t row = q_begin + vector;
  float* lse =
      params.lse == nullptr || !in_tile ? nullptr : params.lse + head * params.lse_stride + row;
  const float old_lse = params.accumulate && in_tile ? *lse : -INFINITY;
  __syncwarp();  // a vector's lanes have read the old lse before one of them writes the new
  if (!in_tile) return;
  const int64_t first = row * params.out_row_stride + head * params.out_head_stride;
  float* out = params.out + first;
  const float* acc = Accumulators(shared) + int64_t{vector} * shape.value_dim;
  const float scale = OutputScale(shared, vector);
  const float part_lse = LseOf(shared, vector);
  if (params.accumulate && part_lse == -INFINITY) return;
  if (old_lse == -INFINITY) {
    for (int32_t d = lane; d < shape.value_dim; d += kThreadsPerVector) {
      StoreElement(params.out, params.rounded_out, first + d, acc[d] * scale);
    }
    if (lane == 0 && lse != nullptr) *lse = part_lse;
    return;
  }
  const MergeWeights weights = WeighByLse(part_lse, old_lse);
  for (int32_t d = lane; d < shape.value_dim; d += kThreadsPerVector) {
    out[d] = weights.other * out[d] + weights.part * (acc[d] * scale);
  }
  if (lane == 0) *lse = weights.lse;
}

}  // namespace

absl::Status RaggedMha(const Launcher& launcher, const RaggedMhaParams& params) {
  RETURN_IF_ERROR(CheckRaggedMha(params));
  if (launcher.device.bfloat16 && params.num_rows > 0 && params.num_seqs > 0 &&
      CanRunFlashMha(params)) {
    return FlashMha(launcher, params);
  }
  const size_t shared_bytes = AttentionSharedBytes(params.v_head_dim);
  if (shared_bytes > kMaxSharedBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("ragged_mha: no cuda kernel for a v_head_dim of ", params.v_head_dim));
  }
  // Every sequence may end with a tile that is not full.
  const int64_t max_tiles = params.num_seqs == 0 || params.num_rows == 0
                                ? 0
                                : CeilDiv(params.num_rows, kTileVectors) + params.num_seqs;
  return Launch(
      launcher, "ragged_mha", RaggedMhaKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_heads), static_cast<uint32_t>(max_tiles)),
       .threads = kAttentionThreads,
       .shared_bytes = shared_bytes},
      params);
}

}  // namespace kernels::cuda

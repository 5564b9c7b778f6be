#include "kernels/cuda/compress_kv.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/kv_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rotation.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kMaxThreads = 512;

// The new rows of one sequence.
struct Rows {
  int64_t first_row;
  int32_t begin;  // positions
  int32_t end;
};

// Softmax-weighted sum of one channel, one token at a time.
struct Pool {
  float max = -INFINITY;
  float sum = 0;
  float weighted = 0;

  __device__ void Add(float kv, float score) {
    if (score > max) {
      const float shrink = expf(max - score);
      sum = sum * shrink + 1.0f;
      weighted = weighted * shrink + kv;
      max = score;
    } else {
      const float weight = expf(score - max);
      sum += weight;
      weighted += weight * kv;
    }
  }
  // `state`: [3, dim], at this channel.
  __device__ void Load(const float* state, int32_t dim) {
    max = state[0];
    sum = state[dim];
    weighted = state[2 * dim];
  }
  __device__ void Store(float* state, int32_t dim) const {
    state[0] = max;
    state[dim] = sum;
    state[2 * dim] = weighted;
  }
};

// Adds the new rows' tokens of one window to channel c of `kv`, `gate` and the bias.
__device__ void AddWindow(const CompressKvParams& params, const Rows& rows, int32_t window,
                          int32_t c, Pool& pool) {
  const int32_t channels = params.overlap ? 2 * params.dim : params.dim;
  const int32_t first = window * params.ratio;
  const int32_t begin = max(rows.begin, first), end = min(rows.end, first + params.ratio);
#pragma unroll 4
  for (int32_t position = begin; position < end; ++position) {
    const int64_t row = rows.first_row + position - rows.begin;
    const float bias = params.position_bias[int64_t{position - first} * channels + c];
    pool.Add(params.kv[row * params.kv_row_stride + c],
             params.gate[row * params.gate_row_stride + c] + bias);
  }
}

// Adds to channel c of entry `window` what the new rows have of it.
__device__ void AddRows(const CompressKvParams& params, const Rows& rows, int32_t window, int32_t c,
                        Pool& pool) {
  if (params.overlap && window > 0) AddWindow(params, rows, window - 1, c, pool);
  AddWindow(params, rows, window, params.overlap ? params.dim + c : c, pool);
}

// values [dim], in shared memory -> the entry in the cache.  Every thread of the block calls it.
__device__ void FinishEntry(const CompressKvParams& params, int32_t seq, int32_t first_row,
                            int32_t entry, float* values, int32_t rotary, double* scratch,
                            Fault* fault) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  const int32_t dim = params.dim;
  const RopeTable& rope = params.rope;
  const int32_t position = entry * params.ratio;
  const int32_t index = entry / params.pages.block_size;
  const int32_t block = index < params.block_table_stride
                            ? params.block_table[seq * params.block_table_stride + index]
                            : -1;
  if (!HasPosition(rope, position) || block < 0) {
    if (thread != 0) return;
    if (block < 0) {
      NoteFault(fault, FaultKind::kNoBlock, seq, position);
    } else {
      NoteFault(fault, FaultKind::kPosition, first_row, position);
    }
    return;
  }
  double sum = 0;
  for (int32_t i = thread; i < dim; i += threads) {
    sum += static_cast<double>(values[i]) * values[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(dim) + static_cast<double>(params.norm_eps)));
  for (int32_t i = thread; i < dim; i += threads) {
    values[i] = values[i] * inverse * params.norm_weight[i];
  }
  __syncthreads();
  for (int32_t i = thread; i < rope.rope_dim / 2; i += threads) {
    RotatePair(rope, position, 1.0f, i, values + dim - rope.rope_dim);
  }
  __syncthreads();
  const int64_t slot = int64_t{block} * params.pages.block_size + entry % params.pages.block_size;
  StoreEntry(params.pages, slot, values, dim - rotary, rotary);
  __syncthreads();
}

// The number of a sequence's first block; they ascend, and a sequence has one block more than its
// rows have whole windows.
__device__ int32_t FirstBlock(const CompressKvParams& params, int32_t seq) {
  return params.cu_seqlens_q[seq] / params.ratio + seq;
}

// A sequence's first block has what touches the state, the entries that were begun before these
// rows and those that they leave open; each other block has one entry of the new rows alone.
// Shared: two entries' values.
__global__ void __launch_bounds__(kMaxThreads)
    CompressKvKernel(CompressKvParams params, int32_t rotary, Fault* fault) {
  __shared__ double scratch[33];
  auto* values = reinterpret_cast<float*>(DynamicShared());
  WaitForPrevious();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int32_t seq = 0, past = params.num_seqs;  // the last sequence that begins at or before the block
  while (past - seq > 1) {
    const int32_t middle = (seq + past) / 2;
    (FirstBlock(params, middle) <= block ? seq : past) = middle;
  }
  const int32_t state_slot = params.state_slots[seq];
  if (state_slot < 0) return;
  const int32_t num_rows = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
  const Rows rows{params.cu_seqlens_q[seq], params.kv_len[seq] - num_rows, params.kv_len[seq]};
  const int32_t begun = rows.begin / params.ratio;  // the entry that the first row belongs to
  const int32_t open = rows.end / params.ratio;     // the first that the rows leave open
  const int32_t dim = params.dim;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  const auto first_row = static_cast<int32_t>(rows.first_row);
  if (block > FirstBlock(params, seq)) {
    const int32_t entry = begun + 1 + block - FirstBlock(params, seq);
    if (entry >= open) return;
    for (int32_t c = thread; c < dim; c += threads) {
      Pool pool;
      AddRows(params, rows, entry, c, pool);
      values[c] = pool.weighted / pool.sum;
    }
    __syncthreads();
    FinishEntry(params, seq, first_row, entry, values, rotary, scratch, fault);
    return;
  }
  float* state = reinterpret_cast<float*>(params.state + state_slot * params.state_stride);
  float* next_state = state + 3 * dim;  // with overlap
  for (int32_t c = thread; c < dim; c += threads) {
    Pool carried, next_carried;
    if (rows.begin > 0) {
      carried.Load(state + c, dim);
      if (params.overlap) next_carried.Load(next_state + c, dim);
    }
    const auto pool_of = [&](int32_t entry) {
      Pool pool;
      if (entry == begun) pool = carried;
      if (entry == begun + 1) pool = next_carried;
      AddRows(params, rows, entry, c, pool);
      return pool;
    };
    for (int32_t i = 0; i < 2 && begun + i < open; ++i) {
      const Pool pool = pool_of(begun + i);
      values[i * dim + c] = pool.weighted / pool.sum;
    }
    pool_of(open).Store(state + c, dim);
    if (params.overlap) pool_of(open + 1).Store(next_state + c, dim);
  }
  __syncthreads();
  for (int32_t i = 0; i < 2 && begun + i < open; ++i) {
    FinishEntry(params, seq, first_row, begun + i, values + i * dim, rotary, scratch, fault);
  }
}

}  // namespace

absl::Status CompressKv(const Launcher& launcher, const CompressKvParams& params) {
  RETURN_IF_ERROR(CheckCompressKv(params));
  if (params.num_seqs == 0) return absl::OkStatus();
  const size_t shared_bytes = 2 * sizeof(float) * static_cast<size_t>(params.dim);
  if (shared_bytes > kMaxSharedBytes - 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("compress_kv: no cuda kernel for entries of ", params.dim, " values"));
  }
  const int32_t threads = std::min(CeilDiv(params.dim, kWarpSize) * kWarpSize, kMaxThreads);
  return Launch(
      launcher, "compress_kv", CompressKvKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows / params.ratio + params.num_seqs)),
       .threads = threads,
       .shared_bytes = shared_bytes,
       .early = true},
      params, RotaryValues(params), launcher.device.fault);
}

}  // namespace kernels::cuda

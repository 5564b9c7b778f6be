#include "kernels/cuda/latent_decode.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kernels::cuda {
namespace {

// Sizes this kernel is made for: DeepSeek's.
constexpr int32_t kRank = 512;
constexpr int32_t kRope = 64;
constexpr int32_t kKeyDim = kRank + kRope;

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kVectors = 16;  // rows of an mma
constexpr int32_t kKeys = 64;     // of a tile
constexpr int32_t kStages = 2;
constexpr int32_t kKeysPerWarp = kKeys / kWarps;     // of the scores
constexpr int32_t kColumnsPerWarp = kRank / kWarps;  // of the output
static_assert(kKeysPerWarp == 8 && kColumnsPerWarp % 16 == 0);

// Rows of shared memory are 16 bytes longer than a multiple of 128, so that the 8 rows of a matrix
// lie in different banks.
constexpr int32_t kKeyStride = kKeyDim + 8;
constexpr int32_t kWeightStride = kKeys + 8;

struct Shared {
  uint16_t keys[kStages][kKeys][kKeyStride];
  uint16_t queries[kVectors][kKeyStride];
  uint16_t weights[kVectors][kWeightStride];
  float tile_max[kWarps][kVectors];
  float sums[kWarps][kVectors];
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

struct Work {
  int32_t seq;
  int64_t begin;  // keys [begin, end) of the sequence
  int64_t end;
  int32_t group;  // which of its sequence's groups of splits
};

// The splits of one block: `group_splits` of a sequence, from a multiple of that on.  False:
// another block has this split.
__device__ bool FindWork(const AbsorbedDecodeParams& params, int32_t group_splits, int32_t split,
                         Work* work) {
  const int32_t seq = params.splits[split].seq;
  if (seq < 0 || seq >= params.num_seqs) return false;
  int32_t first = split;
  while (first > 0 && params.splits[first - 1].seq == seq) --first;
  if ((split - first) % group_splits != 0) return false;
  int32_t last = split;
  while (last + 1 < params.num_splits && last + 1 < split + group_splits &&
         params.splits[last + 1].seq == seq) {
    ++last;
  }
  *work = {seq, params.splits[split].kv_begin, params.splits[last].kv_end,
           (split - first) / group_splits};
  return true;
}

class Block {
 public:
  __device__ Block(const AbsorbedDecodeParams& params, const Work& work, Fault* fault)
      : params_(params),
        work_(work),
        fault_(fault),
        shared_(*reinterpret_cast<Shared*>(DynamicShared())),
        warp_(static_cast<int32_t>(threadIdx.x) / kWarpSize),
        lane_(static_cast<int32_t>(threadIdx.x) % kWarpSize) {
    q_begin_ = params.cu_seqlens_q[work.seq];
    const int32_t q_len = params.cu_seqlens_q[work.seq + 1] - params.cu_seqlens_q[work.seq];
    first_ = int64_t{blockIdx.y} * kVectors;
    const int64_t left = int64_t{q_len} * params.num_heads - first_;
    num_vectors_ = left < kVectors ? static_cast<int32_t>(left) : kVectors;
    // Row r of the sequence sees keys [0, unseen_end + r).
    unseen_end_ = int64_t{params.kv_len[work.seq]} - q_len + 1;
    const int64_t last_seen = unseen_end_ + (first_ + num_vectors_ - 1) / params.num_heads;
    end_ = last_seen < work.end ? last_seen : work.end;
  }

  __device__ bool empty() const { return num_vectors_ <= 0; }

  __device__ void Run(float* partial_out, float* partial_lse) {
    LoadQueries();
    int32_t stage = 0;
    if (work_.begin < end_) LoadKeys(work_.begin, 0);
    CommitCopies();
    for (int32_t i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0;
      const int64_t vector = first_ + lane_ / 4 + 8 * i;
      num_seen_[i] = unseen_end_ + vector / params_.num_heads;
    }
    for (int64_t tile = work_.begin; tile < end_; tile += kKeys, stage ^= 1) {
      if (tile + kKeys < end_) LoadKeys(tile + kKeys, stage ^ 1);
      CommitCopies();
      WaitForCopies<1>();
      __syncthreads();
      AttendTile(tile, shared_.keys[stage]);
      __syncthreads();
    }
    Store(partial_out, partial_lse);
  }

 private:
  __device__ void LoadQueries() {
    for (int32_t e = threadIdx.x; e < kVectors * kKeyDim; e += kThreads) {
      const int32_t i = e / kKeyDim, d = e % kKeyDim;
      float value = 0;
      if (i < num_vectors_) {
        const int64_t row = q_begin_ + (first_ + i) / params_.num_heads;
        const int64_t head = (first_ + i) % params_.num_heads;
        value = d < kRank ? params_.q_latent[row * params_.q_latent_row_stride +
                                             head * params_.q_latent_head_stride + d]
                          : params_.q_rope[row * params_.q_rope_row_stride +
                                           head * params_.q_rope_head_stride + d - kRank];
      }
      shared_.queries[i][d] = static_cast<uint16_t>(PackBfloat16(value, 0));
    }
  }

  // Keys [begin, begin + kKeys) that exist; zeros for the others.
  __device__ void LoadKeys(int64_t begin, int32_t stage) {
    constexpr int32_t kPieces = kKeyDim * 2 / 16;  // of a key, 16 bytes each
    const int32_t* blocks = params_.block_table + work_.seq * params_.block_table_stride;
    const KvPages& pages = params_.pages;
    for (int32_t e = threadIdx.x; e < kKeys * kPieces; e += kThreads) {
      const int32_t key = e / kPieces, piece = e % kPieces;
      const int64_t position = begin + key;
      const std::byte* from = pages.base;
      bool valid = position < end_;
      if (valid) {
        const int64_t index = position / pages.block_size;
        const int64_t block = index < params_.block_table_stride ? blocks[index] : -1;
        valid = block >= 0;
        if (valid) {
          from += block * pages.block_stride + position % pages.block_size * pages.entry_bytes +
                  piece * 16;
        } else {
          NoteFault(fault_, FaultKind::kNoBlock, work_.seq, position);
        }
      }
      CopyAsync(&shared_.keys[stage][key][piece * 8], from, valid);
    }
  }

  __device__ void AttendTile(int64_t tile, const uint16_t (&keys)[kKeys][kKeyStride]) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    // Scores of this warp's 8 keys: s[0], s[1] of vector g, s[2], s[3] of vector g + 8.
    float s[4] = {}, odd[4] = {};
    const uint16_t* query_row = shared_.queries[lane_ % 16] + lane_ / 16 * 8;
    const uint16_t* key_row = keys[warp_ * kKeysPerWarp + lane_ % 8] + lane_ / 8 * 8;
#pragma unroll 6
    for (int32_t d = 0; d < kKeyDim; d += 32) {
      uint32_t k[4], q[4];
      LoadMatrices(k, key_row + d);
      LoadMatrices(q, query_row + d);
      Mma(s, q[0], q[1], q[2], q[3], k[0], k[1]);
      LoadMatrices(q, query_row + d + 16);
      Mma(odd, q[0], q[1], q[2], q[3], k[2], k[3]);
    }
    const float scale = params_.softmax_scale;
    float new_max[2];
    for (int32_t i = 0; i < 2; ++i) {
      float row_max = -INFINITY;
      for (int32_t j = 0; j < 2; ++j) {
        float& score = s[2 * i + j];
        score = (score + odd[2 * i + j]) * scale;
        const int64_t key = tile + warp_ * kKeysPerWarp + 2 * t + j;
        if (key >= num_seen_[i] || key >= end_) score = -INFINITY;
        row_max = fmaxf(row_max, score);
      }
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
      if (t == 0) shared_.tile_max[warp_][g + 8 * i] = row_max;
    }
    __syncthreads();
    float correction[2];
    for (int32_t i = 0; i < 2; ++i) {
      new_max[i] = max_[i];
      for (int32_t w = 0; w < kWarps; ++w) {
        new_max[i] = fmaxf(new_max[i], shared_.tile_max[w][g + 8 * i]);
      }
      // Nothing seen yet: no correction, and no NaN from -inf minus itself.
      correction[i] = max_[i] == new_max[i] ? 1.0f : __expf(max_[i] - new_max[i]);
      max_[i] = new_max[i];
      float p[2];
      for (int32_t j = 0; j < 2; ++j) {
        const float score = s[2 * i + j];
        p[j] = score == -INFINITY ? 0.0f : __expf(score - new_max[i]);
      }
      sum_[i] = sum_[i] * correction[i] + (p[0] + p[1]);
      *reinterpret_cast<uint32_t*>(&shared_.weights[g + 8 * i][warp_ * kKeysPerWarp + 2 * t]) =
          PackBfloat16(p[0], p[1]);
    }
    __syncthreads();
    for (int32_t n = 0; n < kColumnsPerWarp / 8; ++n) {
      for (int32_t i = 0; i < 4; ++i) out_[n][i] *= correction[i / 2];
    }
    const uint16_t* weight_row = shared_.weights[lane_ % 16] + lane_ / 16 * 8;
    const uint16_t* value_row = keys[lane_ % 16] + warp_ * kColumnsPerWarp + lane_ / 16 * 8;
#pragma unroll
    for (int32_t k = 0; k < kKeys; k += 16) {
      uint32_t p[4];
      LoadMatrices(p, weight_row + k);
#pragma unroll
      for (int32_t n = 0; n < kColumnsPerWarp / 8; n += 2) {
        uint32_t v[4];
        LoadMatricesTransposed(v, value_row + k * kKeyStride + n * 8);
        Mma(out_[n], p[0], p[1], p[2], p[3], v[0], v[1]);
        Mma(out_[n + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
      }
    }
  }

  // The block's share of each vector's result, divided by its own sum.
  __device__ void Store(float* partial_out, float* partial_lse) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    for (int32_t i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (t == 0) shared_.sums[warp_][g + 8 * i] = sum;
    }
    __syncthreads();
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t vector = g + 8 * i;
      if (vector >= num_vectors_) continue;
      float sum = 0;
      for (int32_t w = 0; w < kWarps; ++w) sum += shared_.sums[w][vector];
      const bool nothing = max_[i] == -INFINITY && sum == 0;
      const float inverse = nothing ? 0.0f : 1.0f / sum;
      const int64_t row = q_begin_ + (first_ + vector) / params_.num_heads;
      const int64_t head = (first_ + vector) % params_.num_heads;
      const int64_t partial =
          (row * params_.max_splits_per_seq + work_.group) * params_.num_heads + head;
      float* out = partial_out + partial * kRank + warp_ * kColumnsPerWarp + 2 * t;
      for (int32_t n = 0; n < kColumnsPerWarp / 8; ++n) {
        *reinterpret_cast<float2*>(out + n * 8) =
            make_float2(out_[n][2 * i] * inverse, out_[n][2 * i + 1] * inverse);
      }
      if (warp_ == 0 && t == 0) {
        partial_lse[partial] = nothing ? -INFINITY : max_[i] + logf(sum);
      }
    }
  }

  const AbsorbedDecodeParams& params_;
  const Work work_;
  Fault* const fault_;
  Shared& shared_;
  const int32_t warp_;
  const int32_t lane_;
  int64_t q_begin_;
  int64_t first_;  // query vector of the sequence
  int32_t num_vectors_;
  int64_t unseen_end_;
  int64_t end_;
  // Of vectors g and g + 8.
  int64_t num_seen_[2];
  float max_[2];
  float sum_[2];  // this lane's keys
  float out_[kColumnsPerWarp / 8][4] = {};
};

// Grid: splits, tiles of query vectors.
__global__ void __launch_bounds__(kThreads, 1)
    LatentDecodeKernel(AbsorbedDecodeParams params, int32_t group_splits, float* partial_out,
                       float* partial_lse, Fault* fault) {
  Work work;
  if (!FindWork(params, group_splits, static_cast<int32_t>(blockIdx.x), &work)) return;
  Block block(params, work, fault);
  if (block.empty()) return;
  block.Run(partial_out, partial_lse);
}

}  // namespace

bool CanRunLatentDecode(const AbsorbedDecodeParams& params) {
  const KvPages& pages = params.pages;
  return params.kv_lora_rank == kRank && params.qk_rope_head_dim == kRope &&
         pages.format == KvFormat::kBfloat16 && pages.entry_bytes % 16 == 0 &&
         pages.block_stride % 16 == 0 && reinterpret_cast<uintptr_t>(pages.base) % 16 == 0;
}

int32_t SplitsPerBlock(const Launcher& launcher, const AbsorbedDecodeParams& params) {
  const int64_t tiles = CeilDiv(int64_t{params.max_q_len} * params.num_heads, int64_t{kVectors});
  // Two blocks a multiprocessor, one after the other, balance sequences of different lengths.
  const int64_t wanted = CeilDiv(params.num_splits * tiles, int64_t{2} * launcher.device.num_sms);
  return static_cast<int32_t>(
      std::clamp<int64_t>(wanted, 1, std::max(params.max_splits_per_seq, 1)));
}

absl::Status LatentDecode(const Launcher& launcher, const AbsorbedDecodeParams& params,
                          int32_t splits_per_block, float* partial_out, float* partial_lse) {
  const int64_t tiles = CeilDiv(int64_t{params.max_q_len} * params.num_heads, int64_t{kVectors});
  return Launch(
      launcher, "latent decode", LatentDecodeKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_splits), static_cast<uint32_t>(tiles)),
       .threads = kThreads,
       .shared_bytes = sizeof(Shared)},
      params, splits_per_block, partial_out, partial_lse, launcher.device.fault);
}

}  // namespace kernels::cuda

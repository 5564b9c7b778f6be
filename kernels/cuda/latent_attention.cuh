// Attention of LatentDecode: what a warpgroup does with the tiles of keys that reach it in shared
// memory.  Products have keys (for scores) and the latent's dimensions (for sums of values) as
// their 64 rows, query vectors as their columns, of which few are enough to fill them.

#ifndef KERNELS_CUDA_LATENT_ATTENTION_CUH_
#define KERNELS_CUDA_LATENT_ATTENTION_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/latent_decode.h"
#include "kernels/cuda/latent_line.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/narrow_product.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kLatentRope = 64;
inline constexpr int32_t kLatentKeyDim = kLatentRank + kLatentRope;
inline constexpr int32_t kKeyBoxes = kLatentKeyDim / kBoxColumns;  // along a key
inline constexpr int32_t kValueBoxes = kLatentRank / kBoxColumns;
// A tile of keys arrives, and is given back, in chunks of three boxes.
inline constexpr int32_t kChunkBoxes = 3;
inline constexpr int32_t kTileChunks = kKeyBoxes / kChunkBoxes;
inline constexpr int32_t kWarpgroupWarps = kWarpgroupThreads / kWarpSize;
inline constexpr float kLog2E = 1.44269504f;
static_assert(kLatentTileKeys == kBoxRows && kTileChunks * kChunkBoxes == kKeyBoxes);

// Warpgroups that multiply, and how many vectors each carries.
template <int32_t kGroupCount, int32_t kColumnCount>
struct LatentShape {
  static constexpr int32_t kGroups = kGroupCount;
  static constexpr int32_t kColumns = kColumnCount;
  static constexpr int32_t kVectors = kGroups * kColumns;
  static constexpr int32_t kMultipliers = kGroups * kWarpgroupThreads;
  // Of the last warpgroup one warp copies.
  static constexpr int32_t kThreads = kMultipliers + kWarpgroupThreads;
  static constexpr int32_t kChunks = kVectors == 16 ? 8 : kVectors == 32 ? 7 : 6;
};

// 1024-byte aligned.
template <typename S>
struct LatentShared {
  uint16_t keys[S::kChunks][kChunkBoxes][kBoxElements];
  // As the copy engine would lay boxes of kColumns rows out.
  uint16_t queries[S::kGroups][kKeyBoxes][S::kColumns * kBoxColumns];
  union {
    uint16_t weights[S::kGroups][S::kColumns * kLatentTileKeys];
    int32_t tiles_before[kMaxLatentSeqs + 1];  // before the first weights
  };
  alignas(16) float parts[S::kGroups][kWarpgroupWarps][S::kColumns];  // of maxima and sums
  Barrier full[S::kChunks];
  Barrier empty[S::kChunks];
};

struct LatentArgs {
  CUtensorMap keys = {};
  int32_t box_rows = 0;  // keys of a box: those of a block, if they are fewer than a tile
  int32_t num_lines = 1;
  AbsorbedDecodeParams params;
  LatentPartials partials;
  Fault* fault = nullptr;
};

__device__ inline void SyncWarpgroup(int32_t group) {
  asm volatile("bar.sync %0, %1;" : : "r"(group + 1), "n"(kWarpgroupThreads) : "memory");
}
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float MaxOverRows(float value) {  // of a warp's sums
  for (int32_t offset = 4; offset < kWarpSize; offset *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}
__device__ inline float SumOverRows(float value) {
  for (int32_t offset = 4; offset < kWarpSize; offset *= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// A warpgroup with its vectors.  Thread (w, g, t) has of scores keys 16 w + g and + 8, of values
// dimensions 16 w + g and + 8 of every box, both for vectors 8 j + 2 t and + 1.
template <typename S>
class LatentAttention {
 public:
  __device__ LatentAttention(LatentShared<S>& shared, const LatentArgs& args)
      : shared_(shared),
        args_(args),
        params_(args.params),
        scale_log2_(args.params.softmax_scale * kLog2E) {}

  // Loads the segment's queries.
  __device__ void Begin(const LineWalk<S::kVectors>& segment) {
    first_ = segment.vector_tile() * S::kVectors + group_ * S::kColumns;
    num_vectors_ = min(S::kColumns, segment.num_vectors() - first_);
    kv_len_ = segment.kv_len();
    num_old_ = kv_len_ - segment.q_len();
    LoadQueries(segment.q_begin());
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (int32_t box = 0; box < kValueBoxes; ++box) {
      for (int32_t i = 0; i < kSums; ++i) out_[box][i] = 0;
    }
  }

  // The ring's next tile, which is `tile` of the sequence's.
  __device__ void AttendTile(int32_t tile) {
    RingPosition<S::kChunks> at[kTileChunks];
#pragma unroll
    for (int32_t c = 0; c < kTileChunks; ++c, at_.Advance()) at[c] = at_;
    float scores[kSums];
    MultiplyKeys(at, scores);
    const int32_t first_key = tile * kLatentTileKeys;
    // Row r of the sequence sees keys [0, num_old + 1 + r).
    if (first_key + kLatentTileKeys > num_old_ + 1) Mask(first_key, scores);
    Weigh(scores);
    if (kv_len_ - first_key < kLatentTileKeys) ClearValues(at, kv_len_ - first_key);
    PublishShared();
    SyncWarpgroup(group_);
    MultiplyValues(at);
  }

  // The segment's share of each vector's result, divided by its own sum.
  __device__ void Store(const LineWalk<S::kVectors>& segment) {
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) sum_[i] = SumOverRows(sum_[i]);
    Exchange(sum_);
    const int64_t partial =
        PartialNumber<S::kVectors>(params_, args_.num_lines, segment.seq(), segment.vector_tile(),
                                   static_cast<int32_t>(blockIdx.x) / args_.num_lines);
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) {
      float sum = 0;
      for (int32_t w = 0; w < kWarpgroupWarps; ++w) sum += shared_.parts[group_][w][Column(i)];
      if (Column(i) >= num_vectors_) continue;
      const bool nothing = sum == 0;
      const float inverse = nothing ? 0.0f : 1.0f / sum;
      const int64_t place = partial * S::kVectors + group_ * S::kColumns + Column(i);
      float* out = args_.partials.out + place * kLatentRank + 16 * warp_ + g_;
#pragma unroll
      for (int32_t box = 0; box < kValueBoxes; ++box) {
        out[box * kBoxColumns] = out_[box][4 * (i / 2) + i % 2] * inverse;
        out[box * kBoxColumns + 8] = out_[box][4 * (i / 2) + i % 2 + 2] * inverse;
      }
      if (warp_ == 0 && g_ == 0) {
        args_.partials.lse[place] =
            nothing ? -INFINITY : (max_[i] + log2f(sum)) * 0.693147181f;  // ln(2)
      }
    }
  }

 private:
  static constexpr int32_t kSums = S::kColumns / 2;  // of a thread and product
  static constexpr int32_t kOwn = S::kColumns / 4;   // vectors of a thread

  // Own vector i: its scores are those at 4 (i / 2) + i % 2 and two further on.
  __device__ int32_t Column(int32_t i) const { return i / 2 * 8 + 2 * t_ + i % 2; }

  __device__ void LoadQueries(int32_t q_begin) {
    constexpr int32_t kPieces = kLatentKeyDim / 8;  // of a query, 8 values each
    constexpr int32_t kPasses = S::kColumns * kPieces / kWarpgroupThreads;
    constexpr int32_t kBatch = 9;  // under way before the first is stored
    static_assert(kPasses * kWarpgroupThreads == S::kColumns * kPieces && kPasses % kBatch == 0);
    for (int32_t pass = 0; pass < kPasses; pass += kBatch) {
      float4 values[kBatch][2] = {};
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const int32_t e = (pass + i) * kWarpgroupThreads + thread_;
        const int32_t vector = e / kPieces, d = e % kPieces * 8;
        if (vector >= num_vectors_) continue;
        const int64_t row = q_begin + (first_ + vector) / params_.num_heads;
        const int64_t head = (first_ + vector) % params_.num_heads;
        const auto* from = reinterpret_cast<const float4*>(
            d < kLatentRank ? params_.q_latent + row * params_.q_latent_row_stride +
                                  head * params_.q_latent_head_stride + d
                            : params_.q_rope + row * params_.q_rope_row_stride +
                                  head * params_.q_rope_head_stride + d - kLatentRank);
        values[i][0] = from[0];
        values[i][1] = from[1];
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const int32_t e = (pass + i) * kWarpgroupThreads + thread_;
        const int32_t vector = e / kPieces, d = e % kPieces * 8;
        const int32_t piece = d % kBoxColumns / 8;
        const float4 a = values[i][0], b = values[i][1];
        *reinterpret_cast<uint4*>(shared_.queries[group_][d / kBoxColumns] + vector * kBoxColumns +
                                  (piece ^ vector % 8) * 8) =
            make_uint4(PackBfloat16(a.x, a.y), PackBfloat16(a.z, a.w), PackBfloat16(b.x, b.y),
                       PackBfloat16(b.z, b.w));
      }
    }
    PublishShared();
    SyncWarpgroup(group_);
  }

  __device__ void MultiplyKeys(const RingPosition<S::kChunks> (&at)[kTileChunks],
                               float (&scores)[kSums]) {
    const uint64_t queries = DescribeRows(shared_.queries[group_]);
#pragma unroll
    for (int32_t c = 0; c < kTileChunks; ++c) {
      const uint64_t keys = DescribeRows(shared_.keys[Common(at[c].stage)]);
      WaitFor(&shared_.full[at[c].stage], at[c].parity);
      KeepSums(scores);
      BeginProducts();
#pragma unroll
      for (int32_t box = 0; box < kChunkBoxes; ++box) {
#pragma unroll
        for (int32_t d = 0; d < kBoxColumns; d += kProductDepth) {
          MultiplyNarrow<LeftOperand::kBoxRows>(
              scores, Further(keys, box * kBoxElements + d),
              Further(queries, (c * kChunkBoxes + box) * S::kColumns * kBoxColumns + d),
              c > 0 || box > 0 || d > 0);
        }
      }
      CommitProducts();
    }
    WaitForProducts<0>();
    KeepSums(scores);
  }

  __device__ void Mask(int32_t first_key, float (&scores)[kSums]) {
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) {
      const int32_t row = (first_ + Column(i)) / params_.num_heads;
      const int32_t seen = min(kv_len_, num_old_ + 1 + row) - first_key - 16 * warp_ - g_;
      float* own = scores + 4 * (i / 2) + i % 2;
      if (seen <= 0) own[0] = -INFINITY;
      if (seen <= 8) own[2] = -INFINITY;
    }
  }

  // Every warp's values to all of them, with a barrier.
  __device__ void Exchange(const float (&own)[kOwn]) {
    if (g_ == 0) {
#pragma unroll
      for (int32_t i = 0; i < kOwn; i += 2) {
        *reinterpret_cast<float2*>(&shared_.parts[group_][warp_][Column(i)]) =
            make_float2(own[i], own[i + 1]);
      }
    }
    SyncWarpgroup(group_);
  }

  // scores -> weights in shared memory, relative to the vectors' new largest; earlier sums are
  // rescaled.
  __device__ void Weigh(float (&scores)[kSums]) {
    float largest[kOwn];
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) {
      const float* own = scores + 4 * (i / 2) + i % 2;
      largest[i] = MaxOverRows(fmaxf(own[0], own[2]));
    }
    Exchange(largest);
    float shrink[kOwn];
#pragma unroll
    for (int32_t i = 0; i < kOwn; ++i) {
      float max = -INFINITY;
#pragma unroll
      for (int32_t w = 0; w < kWarpgroupWarps; ++w) {
        max = fmaxf(max, shared_.parts[group_][w][Column(i)]);
      }
      max = fmaxf(max * scale_log2_, max_[i]);
      // Nothing seen yet: no NaN from -inf minus itself.
      const float base = max == -INFINITY ? 0.0f : max;
      shrink[i] = Exp2(max_[i] - base);
      max_[i] = max;
      float* own = scores + 4 * (i / 2) + i % 2;
      own[0] = Exp2(fmaf(own[0], scale_log2_, -base));
      own[2] = Exp2(fmaf(own[2], scale_log2_, -base));
      sum_[i] = fmaf(sum_[i], shrink[i], own[0] + own[2]);
    }
    // Row r of the weights is vector r's: matrix 2 j + h is of its rows 8 j and on, and of the
    // warp's keys 8 h and on.
    const int32_t row = lane_ / 16 * 8 + lane_ % 8, piece = 2 * warp_ + lane_ / 8 % 2;
    uint16_t* to = shared_.weights[group_] + row * kLatentTileKeys + (piece ^ lane_ % 8) * 8;
#pragma unroll
    for (int32_t j = 0; j < kSums; j += 8) {
      StoreMatricesTransposed(to + j * 2 * kLatentTileKeys, PackBfloat16(scores[j], scores[j + 1]),
                              PackBfloat16(scores[j + 2], scores[j + 3]),
                              PackBfloat16(scores[j + 4], scores[j + 5]),
                              PackBfloat16(scores[j + 6], scores[j + 7]));
    }
#pragma unroll
    for (int32_t box = 0; box < kValueBoxes; ++box) {
#pragma unroll
      for (int32_t i = 0; i < kSums; ++i) out_[box][i] *= shrink[i / 4 * 2 + i % 2];
    }
  }

  // Values of keys [count, 64) become zeros for this warpgroup's products.
  __device__ void ClearValues(const RingPosition<S::kChunks> (&at)[kTileChunks], int32_t count) {
#pragma unroll
    for (int32_t box = 0; box < kValueBoxes; ++box) {
      uint16_t* keys = shared_.keys[at[box / kChunkBoxes].stage][box % kChunkBoxes];
      for (int32_t i = count * kBoxColumns + 8 * thread_; i < kBoxElements;
           i += 8 * kWarpgroupThreads) {
        *reinterpret_cast<uint4*>(keys + i) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Adds the tile's weighed values, and gives its chunks back.
  __device__ void MultiplyValues(const RingPosition<S::kChunks> (&at)[kTileChunks]) {
#pragma unroll
    for (int32_t box = 0; box < kValueBoxes; ++box) KeepSums(out_[box]);
    BeginProducts();
    const uint64_t weights = DescribeRows(shared_.weights[group_]);
#pragma unroll
    for (int32_t c = 0; c < kTileChunks; ++c) {
      const uint64_t values =
          DescribeColumns(shared_.keys[Common(at[c].stage)], kBoxElements * sizeof(uint16_t));
#pragma unroll
      for (int32_t box = 0; box < kChunkBoxes && c * kChunkBoxes + box < kValueBoxes; ++box) {
#pragma unroll
        for (int32_t key = 0; key < kLatentTileKeys; key += kProductDepth) {
          MultiplyNarrow<LeftOperand::kBoxColumns>(
              out_[c * kChunkBoxes + box], Further(values, box * kBoxElements + key * kBoxColumns),
              Further(weights, key), true);
        }
      }
      CommitProducts();
    }
    WaitForProducts<2>();
    if (lane_ == 0) Arrive(&shared_.empty[at[0].stage]);
    WaitForProducts<1>();
    if (lane_ == 0) Arrive(&shared_.empty[at[1].stage]);
    WaitForProducts<0>();
    if (lane_ == 0) Arrive(&shared_.empty[at[2].stage]);
#pragma unroll
    for (int32_t box = 0; box < kValueBoxes; ++box) KeepSums(out_[box]);
  }

  LatentShared<S>& shared_;
  const LatentArgs& args_;
  const AbsorbedDecodeParams& params_;
  const float scale_log2_;
  const int32_t group_ = Common(static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads);
  const int32_t thread_ = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  const int32_t warp_ = thread_ / kWarpSize;
  const int32_t lane_ = thread_ % kWarpSize;
  const int32_t g_ = lane_ / 4;
  const int32_t t_ = lane_ % 4;
  RingPosition<S::kChunks> at_;
  // The segment's.
  int32_t first_ = 0;        // of the sequence's vectors, the warpgroup's first
  int32_t num_vectors_ = 0;  // none or fewer: zeros for queries, nothing stored
  int32_t kv_len_ = 0;
  int32_t num_old_ = 0;
  float max_[kOwn];  // in powers of two
  float sum_[kOwn];  // this thread's keys
  float out_[kValueBoxes][kSums];
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LATENT_ATTENTION_CUH_

#include "kernels/cuda/latent_decode.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kRope = 64;
constexpr int32_t kKeyDim = kLatentRank + kRope;
constexpr int32_t kKeyBytes = 2 * kKeyDim;
constexpr int32_t kVectors = kLatentVectors;
constexpr int32_t kTileKeys = 32;
constexpr int32_t kStages = 5;
constexpr int32_t kWarps = 8;
constexpr int32_t kThreads = kWarps * kWarpSize;
constexpr int32_t kMaxSeqs = 1024;
constexpr int32_t kMaxBlocks = 256;
// Scores: a warp has 8 keys and half of the key's values.
constexpr int32_t kHalfDim = kKeyDim / 2;
constexpr int32_t kHalfSteps = kHalfDim / 16;
constexpr int32_t kColumnsPerWarp = kLatentRank / kWarps;
static_assert(kTileKeys / 8 * 2 == kWarps && kHalfSteps % 2 == 0 && kColumnsPerWarp % 16 == 0);

// Rows of keys are 16 bytes longer than a multiple of 128, so that the 8 rows of a matrix lie in
// different banks; rows of scores 32 bytes.
constexpr int32_t kKeyStride = kKeyDim + 8;
constexpr int32_t kScoreStride = kTileKeys + 8;

struct Shared {
  uint16_t keys[kStages][kTileKeys][kKeyStride];
  uint16_t queries[kVectors][kKeyStride];
  float scores[2][kVectors][kScoreStride];  // halves of the sum
  int32_t tiles_before[kMaxSeqs + 1];
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

struct Args {
  AbsorbedDecodeParams params;
  LatentPartials partials;
  Fault* fault;
};

__device__ int32_t NumTiles(int32_t keys) { return CeilDiv(max(keys, 0), kTileKeys); }

// The line of tiles: sequence after sequence; of a sequence, vector tile after vector tile.
__device__ void CountTiles(const AbsorbedDecodeParams& params, Shared& shared) {
  for (int32_t seq = threadIdx.x; seq < params.num_seqs; seq += kThreads) {
    const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
    shared.tiles_before[seq + 1] =
        CeilDiv(q_len * params.num_heads, kVectors) * NumTiles(params.kv_len[seq]);
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    int32_t before = 0;
    for (int32_t begin = 0; begin < params.num_seqs; begin += kWarpSize) {
      const int32_t seq = begin + static_cast<int32_t>(threadIdx.x);
      int32_t sum = seq < params.num_seqs ? shared.tiles_before[seq + 1] : 0;
      for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
        const int32_t other = __shfl_up_sync(kFullWarp, sum, offset);
        if (static_cast<int32_t>(threadIdx.x) >= offset) sum += other;
      }
      if (seq < params.num_seqs) shared.tiles_before[seq + 1] = before + sum;
      before += __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    }
    if (threadIdx.x == 0) shared.tiles_before[0] = 0;
  }
  __syncthreads();
}

struct Range {
  int32_t begin;
  int32_t end;
};

// What a block has of one sequence and vector tile.
struct Segment {
  int32_t seq;
  int32_t vector_tile;
  Range tiles;
};

// The segment at `position` of the line.  REQUIRES: position < end <= the line's length.
__device__ Segment SegmentAt(const AbsorbedDecodeParams& params, const Shared& shared,
                             int32_t position, int32_t end) {
  int32_t seq = 0, past = params.num_seqs;  // the last sequence that begins at or before it
  while (past - seq > 1) {
    const int32_t middle = (seq + past) / 2;
    if (shared.tiles_before[middle] <= position) {
      seq = middle;
    } else {
      past = middle;
    }
  }
  const int32_t tiles = NumTiles(params.kv_len[seq]);
  const int32_t at = position - shared.tiles_before[seq];
  const int32_t begin = at % tiles;
  return {seq, at / tiles, {begin, min(tiles, begin + end - position)}};
}

// The number of a sequence's first vector tile; they ascend along the line.
__device__ int32_t FirstVectorTile(const AbsorbedDecodeParams& params, int32_t seq) {
  return params.cu_seqlens_q[seq] * params.num_heads / kVectors + seq;
}

// Where the combining kernel finds the partials of this block's share of the sequences.  Segments
// in the order of the line differ in the vector tile, in the block, or in both, so the sum of their
// numbers tells them apart.
__device__ void WritePlaces(const Args& args, const Shared& shared, int32_t tiles_per_block) {
  const AbsorbedDecodeParams& params = args.params;
  for (int32_t seq = blockIdx.x; seq < params.num_seqs; seq += gridDim.x) {
    const int32_t row_begin = params.cu_seqlens_q[seq];
    const int32_t vectors = (params.cu_seqlens_q[seq + 1] - row_begin) * params.num_heads;
    const int32_t tiles = NumTiles(params.kv_len[seq]);
    for (int32_t i = threadIdx.x; i < vectors; i += kThreads) {
      const int32_t vector_tile = i / kVectors;
      const int32_t begin = shared.tiles_before[seq] + vector_tile * tiles;
      const int32_t first = begin / tiles_per_block;
      const int32_t last = (begin + tiles - 1) / tiles_per_block;
      args.partials.places[int64_t{row_begin} * params.num_heads + i] =
          make_int2((FirstVectorTile(params, seq) + vector_tile + first) * kVectors + i % kVectors,
                    tiles == 0 ? 0 : last - first + 1);
    }
  }
}

// Brings the keys of a range, tile by tile; the block's work.
class Loader {
 public:
  __device__ Loader(const Args& args, Shared& shared, Range range)
      : args_(args), shared_(shared), at_(range.begin), end_(range.end) {
    Find();
  }

  // Whether this step's keys are among those of the tile to come.
  __device__ bool IsNew() const { return at_ < end_ && (tile_ + 1) * kTileKeys > num_old_; }

  // Sends for the next tile, if there is one.
  __device__ void Load(int32_t stage) {
    if (at_ < end_) {
      const KvPages& pages = args_.params.pages;
      const int32_t first = tile_ * kTileKeys;
      int32_t num_keys = min(kv_len_ - first, kTileKeys);
      if (block_ < 0) {
        if (threadIdx.x == 0) {
          NoteFault(args_.fault, FaultKind::kNoBlock, segment_.seq, first);
        }
        num_keys = 0;
      }
      const std::byte* from = num_keys == 0 ? pages.base
                                            : pages.base + block_ * pages.block_stride +
                                                  int64_t{first % pages.block_size} * kKeyBytes;
      auto* to = reinterpret_cast<std::byte*>(shared_.keys[stage]);
      constexpr int32_t kKeyPieces = kKeyBytes / 16;
#pragma unroll
      for (int32_t i = 0; i < kTileKeys * kKeyPieces / kThreads; ++i) {
        const int32_t e = i * kThreads + static_cast<int32_t>(threadIdx.x);
        const int32_t key = e / kKeyPieces;
        CopyAsync(to + (e + key) * 16, key < num_keys ? from + e * 16 : pages.base, key < num_keys);
      }
      ++at_;
      ++tile_;
      Find();
    }
    CommitCopies();
  }

 private:
  // Looks the next tile up; its block is not needed before the next Load.
  __device__ void Find() {
    if (at_ >= end_) return;
    const AbsorbedDecodeParams& params = args_.params;
    if (tile_ == segment_.tiles.end) {
      segment_ = SegmentAt(params, shared_, at_, end_);
      tile_ = segment_.tiles.begin;
      kv_len_ = params.kv_len[segment_.seq];
      num_old_ =
          kv_len_ - params.cu_seqlens_q[segment_.seq + 1] + params.cu_seqlens_q[segment_.seq];
    }
    const int32_t index = tile_ * kTileKeys / params.pages.block_size;
    block_ = index < params.block_table_stride
                 ? params.block_table[segment_.seq * params.block_table_stride + index]
                 : -1;
  }

  const Args& args_;
  Shared& shared_;
  int32_t at_;
  const int32_t end_;
  Segment segment_ = {0, 0, {0, 0}};
  int32_t tile_ = 0;
  int32_t kv_len_ = 0;
  int32_t num_old_ = 0;
  int64_t block_ = -1;
};

class Attention {
 public:
  __device__ Attention(const Args& args, Shared& shared)
      : args_(args),
        params_(args.params),
        shared_(shared),
        warp_(static_cast<int32_t>(threadIdx.x) / kWarpSize),
        lane_(static_cast<int32_t>(threadIdx.x) % kWarpSize) {}

  __device__ void Begin(const Segment& segment) {
    const int32_t q_begin = params_.cu_seqlens_q[segment.seq];
    const int32_t q_len = params_.cu_seqlens_q[segment.seq + 1] - q_begin;
    const int32_t kv_len = params_.kv_len[segment.seq];
    const int32_t first = segment.vector_tile * kVectors;
    num_vectors_ = min(kVectors, q_len * params_.num_heads - first);
    constexpr int32_t kPieces = kKeyDim / 4;  // of a query, 4 values each
#pragma unroll
    for (int32_t e = threadIdx.x; e < kVectors * kPieces; e += kThreads) {
      const int32_t i = e / kPieces, d = e % kPieces * 4;
      float4 value = make_float4(0, 0, 0, 0);
      if (i < num_vectors_) {
        const int64_t row = q_begin + (first + i) / params_.num_heads;
        const int64_t head = (first + i) % params_.num_heads;
        value = *reinterpret_cast<const float4*>(
            d < kLatentRank ? params_.q_latent + row * params_.q_latent_row_stride +
                                  head * params_.q_latent_head_stride + d
                            : params_.q_rope + row * params_.q_rope_row_stride +
                                  head * params_.q_rope_head_stride + d - kLatentRank);
      }
      *reinterpret_cast<uint2*>(&shared_.queries[i][d]) =
          make_uint2(PackBfloat16(value.x, value.y), PackBfloat16(value.z, value.w));
    }
    __syncthreads();
    const uint16_t* row = shared_.queries[lane_ % 16] + lane_ / 16 * 8 + warp_ / 4 * kHalfDim;
#pragma unroll
    for (int32_t i = 0; i < kHalfSteps; ++i) LoadMatrices(query_[i], row + 16 * i);
    for (int32_t i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0;
      // Row r of the sequence sees keys [0, kv_len - q_len + 1 + r).
      const int32_t vector = first + lane_ / 4 + 8 * i;
      num_seen_[i] = min(kv_len, kv_len - q_len + 1 + vector / params_.num_heads);
    }
#pragma unroll
    for (int32_t n = 0; n < kColumnsPerWarp / 8; ++n) {
      for (int32_t i = 0; i < 4; ++i) out_[n][i] = 0;
    }
  }

  __device__ void AttendTile(int32_t tile, const uint16_t (&keys)[kTileKeys][kKeyStride]) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    const int32_t half = warp_ / 4, key = warp_ % 4 * 8;
    float even[4] = {}, odd[4] = {};
    const uint16_t* key_row = keys[key + lane_ % 8] + lane_ / 8 * 8 + half * kHalfDim;
#pragma unroll
    for (int32_t i = 0; i < kHalfSteps; i += 2) {
      uint32_t k[4];
      LoadMatrices(k, key_row + 16 * i);
      const uint32_t(&q)[4] = query_[i];
      const uint32_t(&r)[4] = query_[i + 1];
      Mma(even, q[0], q[1], q[2], q[3], k[0], k[1]);
      Mma(odd, r[0], r[1], r[2], r[3], k[2], k[3]);
    }
    float(&scores)[2][kVectors][kScoreStride] = shared_.scores;
    for (int32_t i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(&scores[half][g + 8 * i][key + 2 * t]) =
          make_float2(even[2 * i] + odd[2 * i], even[2 * i + 1] + odd[2 * i + 1]);
    }
    __syncthreads();
    // Every warp has all weights: weights_[s] are those of keys 16 s .. 16 s + 15.
    uint32_t weights[2][4];
    for (int32_t i = 0; i < 2; ++i) Weigh(tile, scores, i, weights);
    const uint16_t* value_row = keys[lane_ % 16] + warp_ * kColumnsPerWarp + lane_ / 16 * 8;
#pragma unroll
    for (int32_t s = 0; s < kTileKeys / 16; ++s) {
      const uint32_t(&p)[4] = weights[s];
#pragma unroll
      for (int32_t n = 0; n < kColumnsPerWarp / 8; n += 2) {
        uint32_t v[4];
        LoadMatricesTransposed(v, value_row + s * 16 * kKeyStride + n * 8);
        Mma(out_[n], p[0], p[1], p[2], p[3], v[0], v[1]);
        Mma(out_[n + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
      }
    }
  }

  // The segment's share of each vector's result, divided by its own sum.
  __device__ void Store(const Segment& segment) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    const int64_t partial = FirstVectorTile(params_, segment.seq) + segment.vector_tile +
                            static_cast<int32_t>(blockIdx.x);
    for (int32_t i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (g + 8 * i >= num_vectors_) continue;
      const bool nothing = max_[i] == -INFINITY && sum == 0;
      const float inverse = nothing ? 0.0f : 1.0f / sum;
      const int64_t place = partial * kVectors + g + 8 * i;
      float* out = args_.partials.out + place * kLatentRank + warp_ * kColumnsPerWarp + 2 * t;
#pragma unroll
      for (int32_t n = 0; n < kColumnsPerWarp / 8; ++n) {
        *reinterpret_cast<float2*>(out + n * 8) =
            make_float2(out_[n][2 * i] * inverse, out_[n][2 * i + 1] * inverse);
      }
      if (warp_ == 0 && t == 0) {
        args_.partials.lse[place] =
            nothing ? -INFINITY : (max_[i] + log2f(sum)) * 0.693147181f;  // ln(2)
      }
    }
  }

 private:
  // Weights of vector g + 8 i, from scores that count in powers of two; earlier sums are rescaled.
  __device__ void Weigh(int32_t tile, const float (&scores)[2][kVectors][kScoreStride], int32_t i,
                        uint32_t (&weights)[2][4]) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    const float scale = params_.softmax_scale * 1.44269504f;  // log2(e)
    float score[kTileKeys / 8][2];
    float max = -INFINITY;
#pragma unroll
    for (int32_t j = 0; j < kTileKeys / 8; ++j) {
      const float2 a = *reinterpret_cast<const float2*>(&scores[0][g + 8 * i][8 * j + 2 * t]);
      const float2 b = *reinterpret_cast<const float2*>(&scores[1][g + 8 * i][8 * j + 2 * t]);
      const int32_t key = tile * kTileKeys + 8 * j + 2 * t;
      score[j][0] = key < num_seen_[i] ? (a.x + b.x) * scale : -INFINITY;
      score[j][1] = key + 1 < num_seen_[i] ? (a.y + b.y) * scale : -INFINITY;
      max = fmaxf(max, fmaxf(score[j][0], score[j][1]));
    }
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    max = fmaxf(max, max_[i]);
    // Nothing seen yet: no NaN from -inf minus itself.
    const float base = max == -INFINITY ? 0.0f : max;
    const float correction = exp2f(max_[i] - base);
    max_[i] = max;
    float sum = 0;
#pragma unroll
    for (int32_t j = 0; j < kTileKeys / 8; ++j) {
      const float a = exp2f(score[j][0] - base), b = exp2f(score[j][1] - base);
      sum += a + b;
      weights[j / 2][j % 2 * 2 + i] = PackBfloat16(a, b);
    }
    sum_[i] = sum_[i] * correction + sum;
#pragma unroll
    for (int32_t n = 0; n < kColumnsPerWarp / 8; ++n) {
      out_[n][2 * i] *= correction;
      out_[n][2 * i + 1] *= correction;
    }
  }

  const Args& args_;
  const AbsorbedDecodeParams& params_;
  Shared& shared_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t num_vectors_ = 0;
  uint32_t query_[kHalfSteps][4];
  // Of vectors g and g + 8.
  int32_t num_seen_[2];
  float max_[2];
  float sum_[2];  // this lane's keys
  float out_[kColumnsPerWarp / 8][4];
};

// Grid: the multiprocessors.
__global__ void __launch_bounds__(kThreads, 1)
    LatentDecodeKernel(const __grid_constant__ Args args) {
  auto& shared = *reinterpret_cast<Shared*>(DynamicShared());
  const AbsorbedDecodeParams& params = args.params;
  CountTiles(params, shared);
  const int32_t num_tiles = shared.tiles_before[params.num_seqs];
  const int32_t per_block = max(CeilDiv(num_tiles, static_cast<int32_t>(gridDim.x)), 1);
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * per_block;
  const Range range{begin, min(begin + per_block, num_tiles)};
  Loader loader(args, shared, range);
  // Of the keys only this step's were written by a kernel that may still run.
  bool waited = false;
  for (int32_t stage = 0; stage < kStages - 1; ++stage) {
    if (!waited && loader.IsNew()) {
      WaitForPrevious();
      waited = true;
    }
    loader.Load(stage);
  }
  if (!waited) WaitForPrevious();
  WritePlaces(args, shared, per_block);
  Attention attention(args, shared);
  int32_t stage = 0;
  for (int32_t at = range.begin; at < range.end;) {
    const Segment segment = SegmentAt(params, shared, at, range.end);
    at += segment.tiles.end - segment.tiles.begin;
    attention.Begin(segment);
    for (int32_t tile = segment.tiles.begin; tile < segment.tiles.end; ++tile) {
      WaitForCopies<kStages - 2>();
      __syncthreads();  // the tile is there, and everyone is done with the one before
      loader.Load(stage == 0 ? kStages - 1 : stage - 1);
      attention.AttendTile(tile, shared.keys[stage]);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    attention.Store(segment);
  }
}

int64_t LayOut(std::byte* base, int64_t rows, int64_t heads, int64_t blocks,
               LatentPartials& partials) {
  // FirstVectorTile of the end, and a block's number beyond it.
  const int64_t num_partials = rows * heads / kVectors + rows + 1 + blocks;
  ScratchCarver carver(base);
  carver.Take(partials.out, num_partials * kVectors * kLatentRank);
  carver.Take(partials.lse, num_partials * kVectors);
  carver.Take(partials.places, rows * heads);
  return carver.size();
}

}  // namespace

bool CanRunLatentDecode(const AbsorbedDecodeParams& params) {
  const KvPages& pages = params.pages;
  const auto aligned = [](const float* data, int64_t row_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % 4 == 0 &&
           head_stride % 4 == 0;
  };
  return params.kv_lora_rank == kLatentRank && params.qk_rope_head_dim == kRope &&
         params.num_seqs <= kMaxSeqs && pages.format == KvFormat::kBfloat16 &&
         pages.entry_bytes == kKeyBytes && pages.block_size % kTileKeys == 0 &&
         pages.block_stride % 16 == 0 && reinterpret_cast<uintptr_t>(pages.base) % 16 == 0 &&
         aligned(params.q_latent, params.q_latent_row_stride, params.q_latent_head_stride) &&
         aligned(params.q_rope, params.q_rope_row_stride, params.q_rope_head_stride);
}

int64_t LatentDecodeWorkspaceBytes(int32_t max_rows, int32_t num_heads) {
  LatentPartials partials;
  return LayOut(nullptr, max_rows, num_heads, kMaxBlocks, partials);
}

absl::Status LatentDecode(const Launcher& launcher, const AbsorbedDecodeParams& params) {
  const int32_t blocks = std::min(launcher.device.num_sms, kMaxBlocks);
  Args args{.params = params, .partials = {}, .fault = launcher.device.fault};
  LayOut(params.workspace, params.num_rows, params.num_heads, blocks, args.partials);
  RETURN_IF_ERROR(Launch(launcher, "latent decode", LatentDecodeKernel,
                         {.grid = dim3(static_cast<uint32_t>(blocks)),
                          .threads = kThreads,
                          .shared_bytes = sizeof(Shared),
                          .early = true},
                         args));
  return CombineLatents(launcher, params, args.partials);
}

}  // namespace kernels::cuda

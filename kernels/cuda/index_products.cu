#include "kernels/cuda/index_products.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/float8_product.cuh"
#include "kernels/cuda/index_runs.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/narrow_product.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup_product.cuh"
#include "kernels/cuda/weight_ring.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kHeads = 64;
constexpr int32_t kDim = 128;
constexpr int32_t kKeys = kIndexTileKeys;
constexpr int32_t kLineBytes = 128;  // of a box: what a swizzle permutes
constexpr int32_t kStepBytes = 32;   // of a key or query, of one product
constexpr size_t kBoxAlignment = 1024;
static_assert(kKeys == kProductRows);

// Keys are the left operand, from registers; queries the right one, heads its columns.  The order
// of a key's values is free as long as both agree: thread t of four has the t-th quarter of a key,
// eight bytes of it in every step.
template <bool kFloat8_>
struct Format {
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr int32_t kKeyBytes = kFloat8 ? kDim : 2 * kDim;
  static constexpr int32_t kSteps = kKeyBytes / kStepBytes;
  static constexpr int32_t kBoxes = kKeyBytes / kLineBytes;
};

// What a block has: warpgroups, tiles on the way to each of them, rows of a run and of a product.
template <bool kFloat8, int32_t kWarpgroups_, int32_t kStages_, int32_t kRunRows_,
          int32_t kTogether_, int32_t kBlocks_, bool kAhead_>
struct Form : Format<kFloat8> {
  static constexpr int32_t kWarpgroups = kWarpgroups_;
  static constexpr int32_t kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int32_t kWarps = kThreads / kWarpSize;
  static constexpr int32_t kStages = kStages_;
  static constexpr int32_t kRunRows = kRunRows_;
  static constexpr int32_t kTogether = kTogether_;
  static constexpr int32_t kBlocks = kBlocks_;  // a multiprocessor has room for
  static constexpr bool kAhead = kAhead_;       // sends for a row during the run before
  static_assert(kFloat8 || !kAhead);
  using Cursor = RunCursor<kRunRows>;
};
// Keys on their way are as few as keep the memory busy: whatever else a block asks for comes behind
// them.
using Bfloat16Keys = Form<false, 4, 2, 4, 1, 1, false>;
using ManyRows = Form<true, 4, 4, 8, 2, 1, false>;  // of prompts
using DecodeRows = Form<true, 4, 2, 4, 1, 1, true>;
// For few rows: a multiprocessor has room for the next kernel's block too, which is there and knows
// what to send for when this one's ends.
using FewRows = Form<true, 2, 2, 2, 1, 2, true>;
constexpr int32_t kDecodeRows = 256, kFewRows = 8;

template <bool kFloat8>
struct Tile {
  std::byte keys[kKeys * Format<kFloat8>::kKeyBytes];
  float scales[kKeys];  // of fp8 keys
};

// A run's first row as it is in memory, on its way while the keys of the run before are scored.  A
// warp has its own heads.
struct alignas(16) NextRow {
  float q[kHeads][kDim];
  float weights[kHeads];
};
struct NoRow {};

template <typename F>
struct Shared {
  std::byte q[F::kRunRows / F::kTogether][F::kBoxes][F::kTogether * kHeads * kLineBytes];
  Tile<F::kFloat8> tiles[F::kWarpgroups][F::kStages];
  float weights[F::kRunRows][kHeads];  // in the order of WeightPlace
  std::conditional_t<F::kAhead, NextRow, NoRow> next;
  int32_t num_keys[F::kRunRows];  // that a row scores
  int32_t warp_tiles[F::kWarps];
  Barrier full[F::kWarpgroups][F::kStages];
};

// A thread's heads of two groups of eight, 8 j + 2 t and the next one, lie side by side.
__device__ constexpr int32_t WeightPlace(int32_t head) {
  return head / 16 * 16 + head % 8 / 2 * 4 + head / 8 % 2 * 2 + head % 2;
}

// The least power of two by which values up to `amax` become e4m3 numbers, and its inverse.
struct Scale {
  float scale;
  float inverse;
};
__device__ Scale ScaleOf(float amax) {
  constexpr uint32_t kBias = 127, kOneExponent = 23;
  // 448 is 1.75 times 2^8: the exponent is one more where the fraction is above .75.
  constexpr uint32_t kAboveFraction = 0x1fffff;
  const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f));
  const uint32_t exponent = ((bits + kAboveFraction) >> kOneExponent) - 8;
  return {__uint_as_float(exponent << kOneExponent),
          __uint_as_float((2 * kBias - exponent) << kOneExponent)};
}

// The heads of a row that this warp loads.
template <typename F>
struct WarpHeads {
  static constexpr int32_t kCount = CeilDiv(kHeads, F::kWarps);
  const int32_t first = static_cast<int32_t>(threadIdx.x) / kWarpSize * kCount;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
};

// Has this warp's heads of a row set out for shared.next.  REQUIRES: WaitForRow since the last
// call.
template <typename F>
__device__ void SendForRow(Shared<F>& shared, const IndexerLogitsParams& params, int32_t row) {
  const WarpHeads<F> heads;
  const float* q = params.q + row * params.q_row_stride + 4 * heads.lane;
#pragma unroll
  for (int32_t i = 0; i < heads.kCount; ++i) {
    const int32_t head = heads.first + i;
    if (head >= kHeads) break;
    CopyAsync(&shared.next.q[head][4 * heads.lane], q + head * params.q_head_stride, true);
  }
  const int32_t head = heads.first + heads.lane;
  if (heads.lane >= heads.kCount || head >= kHeads) return;
  CopyWordAsync(SharedAddress(&shared.next.weights[head]),
                params.weights + row * params.weights_row_stride + head);
}

// Then the warp's lanes see its heads.
__device__ void WaitForRow() {
  CommitCopies();
  WaitForCopies<0>();
  __syncwarp();
}

// Queries and weights of the run's rows, of the first one from shared.next if there is one, and how
// many keys of each are scored.  fp8: a head's query has a scale of its own, a power of two, which
// its weight takes up.
template <typename F>
__device__ void LoadRows(Shared<F>& shared, const IndexerLogitsParams& params,
                         const IndexRun& run) {
  constexpr int32_t kParts = F::kKeyBytes / 4 / kWarpSize;  // words of a lane
  constexpr int32_t kValues = kDim / kWarpSize / kParts;    // of a word
  const WarpHeads<F> heads;
  const int32_t lane = heads.lane;
  if constexpr (F::kAhead) WaitForRow();
#pragma unroll 2
  for (int32_t row = 0; row < run.num_rows; ++row) {
    const int64_t from = run.first_row + row;
    float values[heads.kCount][kParts][kValues];
    float weights[heads.kCount];
#pragma unroll
    for (int32_t i = 0; i < heads.kCount; ++i) {
      const int32_t head = heads.first + i;
      if (head >= kHeads) break;
      const float* q = params.q + from * params.q_row_stride + head * params.q_head_stride;
#pragma unroll
      for (int32_t part = 0; part < kParts; ++part) {
        const int32_t at = kValues * (part * kWarpSize + lane);
        if constexpr (F::kFloat8) {
          float4 four;
          if constexpr (F::kAhead) {
            four = row == 0 ? *reinterpret_cast<const float4*>(&shared.next.q[head][at])
                            : __ldcg(reinterpret_cast<const float4*>(q + at));
          } else {
            four = __ldcg(reinterpret_cast<const float4*>(q + at));
          }
          values[i][part][0] = four.x, values[i][part][1] = four.y;
          values[i][part][2] = four.z, values[i][part][3] = four.w;
        } else {
          const float2 two = __ldcg(reinterpret_cast<const float2*>(q + at));
          values[i][part][0] = two.x, values[i][part][1] = two.y;
        }
      }
      const float* weight = params.weights + from * params.weights_row_stride + head;
      if constexpr (F::kAhead) {
        weights[i] = row == 0 ? shared.next.weights[head] : __ldcg(weight);
      } else {
        weights[i] = __ldcg(weight);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < heads.kCount; ++i) {
      const int32_t head = heads.first + i;
      if (head >= kHeads) break;
      uint32_t words[kParts];
      if constexpr (F::kFloat8) {
        const float(&v)[kValues] = values[i][0];
        float amax = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
        amax = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(amax)));
        const auto [scale, inverse] = ScaleOf(amax);
        words[0] = PackFloat8(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
        weights[i] *= scale;
      } else {
        for (int32_t part = 0; part < kParts; ++part) {
          words[part] = PackBfloat16(values[i][part][0], values[i][part][1]);
        }
      }
#pragma unroll
      for (int32_t part = 0; part < kParts; ++part) {
        // Word `w` of a query belongs to thread w / kOfQuarter of four; two of them are a step's.
        constexpr int32_t kOfQuarter = F::kKeyBytes / 16;
        const int32_t w = part * kWarpSize + lane;
        const int32_t sixteen = w % kOfQuarter;  // of the query
        constexpr int32_t kSixteens = kLineBytes / 16;
        std::byte* line = shared.q[row / F::kTogether][sixteen / kSixteens] +
                          (row % F::kTogether * kHeads + head) * kLineBytes;
        *reinterpret_cast<uint32_t*>(line + (sixteen % kSixteens ^ head % 8) * 16 +
                                     w / kOfQuarter * 4) = words[part];
      }
      if (lane == 0) shared.weights[row][WeightPlace(head)] = weights[i];
    }
  }
  if (static_cast<int32_t>(threadIdx.x) < run.num_rows) {
    const int32_t row = run.first_row + static_cast<int32_t>(threadIdx.x);
    shared.num_keys[threadIdx.x] = ScoredKeys(params, KeysOfRow(params.rows, row));
  }
  PublishShared();
}

// Bytes to shared memory, counted by the barrier: all multiples of 16.  One thread's work.
__device__ void CopyBytes(void* shared, const void* from, uint32_t bytes, Barrier* barrier,
                          CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :
      : "r"(SharedAddress(shared)), "l"(from), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// What sends for a warpgroup's tiles: one of its warps.  A tile comes in pieces of one block each,
// and lanes look up several tiles' pieces at a time.
template <typename F>
class Sender {
 public:
  __device__ Sender(const IndexerLogitsParams& params, Fault* fault, int32_t end,
                    const typename F::Cursor& cursor, const IndexRun& run)
      : params_(params),
        fault_(fault),
        end_(end),
        cursor_(cursor),
        piece_keys_(min(params.pages.block_size, kKeys)),
        pieces_(kKeys / piece_keys_),
        run_(run) {}

  // Finds the first tiles' keys, which may be done before they are written.
  __device__ void FindAhead(int32_t index) {
    if (index < end_) Find(index);
  }
  // Has the keys of tile `index` and their scales brought; the next call is for the warpgroup's
  // next tile.
  __device__ void Send(int32_t index, Tile<F::kFloat8>& to, Barrier* full) {
    if (index >= end_) return;
    if (index >= found_end_) Find(index);
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    const int32_t piece = lane - (index - found_begin_) / F::kWarpgroups * pieces_;
    if (piece < 0 || piece >= pieces_) return;
    std::byte* keys = to.keys + piece * piece_keys_ * F::kKeyBytes;
    float* scales = to.scales + piece * piece_keys_;
    if (from_ == nullptr) return SendNothing(keys, scales, full);
    const auto key_bytes = static_cast<uint32_t>(piece_keys_ * F::kKeyBytes);
    const auto scale_bytes = static_cast<uint32_t>(F::kFloat8 ? piece_keys_ * sizeof(float) : 0);
    // Keys that one row alone sees are read once.
    const CachePolicy policy = run_.num_rows == 1 ? kEvictFirst : kNoHint;
    ArriveAndExpect(full, key_bytes + scale_bytes);
    if (F::kFloat8 && pieces_ == 1 && to_scales_ == kKeys * F::kKeyBytes) {  // one after the other
      return CopyBytes(keys, from_, key_bytes + scale_bytes, full, policy);
    }
    CopyBytes(keys, from_, key_bytes, full, policy);
    if (F::kFloat8) CopyBytes(scales, from_ + to_scales_, scale_bytes, full, policy);
  }

 private:
  // Looks up the pieces of as many tiles as there are lanes for, `index` the first.
  __device__ void Find(int32_t index) {
    if (index >= run_.end_tile) run_ = cursor_.Find(params_, index);
    const KvPages& pages = params_.pages;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    found_begin_ = index;
    found_end_ = min(run_.end_tile, index + kWarpSize / pieces_ * F::kWarpgroups);
    const int32_t tile = index + lane / pieces_ * F::kWarpgroups;
    const int32_t key = (tile - run_.first_tile) * kKeys + lane % pieces_ * piece_keys_;
    from_ = nullptr;
    if (tile >= min(found_end_, end_) || key >= run_.num_keys) return;
    const int32_t entry = key / pages.block_size, first = key % pages.block_size;
    int32_t block = -1;
    if (entry < params_.rows.block_table_stride) {
      block = params_.rows.block_table[run_.seq * params_.rows.block_table_stride + entry];
    }
    if (block < 0) return NoteFault(fault_, FaultKind::kNoBlock, run_.seq, key);
    from_ = pages.base + block * pages.block_stride + first * F::kKeyBytes;
    to_scales_ = pages.block_size * kDim + first * (static_cast<int32_t>(sizeof(float)) - kDim);
  }

  // Zeros for keys that have no block, or that nobody reads.
  __device__ void SendNothing(std::byte* keys, float* scales, Barrier* full) {
#pragma unroll 1
    for (int32_t i = 0; i < piece_keys_; ++i) {
#pragma unroll 1
      for (int32_t at = 0; at < F::kKeyBytes; at += 16) {
        *reinterpret_cast<uint4*>(keys + i * F::kKeyBytes + at) = make_uint4(0, 0, 0, 0);
      }
      scales[i] = 0;
    }
    PublishShared();
    Arrive(full);
  }

  const IndexerLogitsParams& params_;
  Fault* const fault_;
  const int32_t end_;  // of the block's tiles
  typename F::Cursor cursor_;
  const int32_t piece_keys_;
  const int32_t pieces_;
  IndexRun run_;
  // Tiles whose pieces the lanes have, every F::kWarpgroups-th from the first; of this lane's:
  // where its keys are, null if nowhere, and how much further their scales.
  int32_t found_begin_ = 0, found_end_ = 0;
  const std::byte* from_ = nullptr;
  int32_t to_scales_ = 0;
};

// This thread's quarters of keys `first` and first + 8 of a tile, step by step.
template <bool kFloat8>
__device__ void TakeKeys(const Tile<kFloat8>& tile, int32_t first,
                         uint32_t (&a)[Format<kFloat8>::kSteps][4]) {
  constexpr int32_t kQuarter = Format<kFloat8>::kKeyBytes / 4;
  const int32_t quarter = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const std::byte* from = tile.keys + (4 * (first + 8 * i) + quarter) * kQuarter;
#pragma unroll
    for (int32_t s = 0; s < Format<kFloat8>::kSteps; s += 2) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + 8 * s);
      a[s][i] = four.x;
      a[s][i + 2] = four.y;
      a[s + 1][i] = four.z;
      a[s + 1][i + 2] = four.w;
    }
  }
}

__device__ void SyncWarpgroup(int32_t warpgroup) {
  asm volatile("bar.sync %0, %1;" : : "r"(warpgroup + 1), "n"(kWarpgroupThreads) : "memory");
}

// relu(d) weighted and added over a row's heads, of the two keys that this thread shares with
// three others: its part of the sums.
__device__ void SumHeads(const float* d, const float* weights, float (&sums)[2]) {
  const int32_t quarter = static_cast<int32_t>(threadIdx.x) % 4;
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int32_t j = 0; j < kHeads / 16; ++j) {
    const float4 four = *reinterpret_cast<const float4*>(weights + 16 * j + 4 * quarter);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float* of_key = d + 8 * j + 2 * i;
      sums[i] = fmaf(four.x, fmaxf(of_key[0], 0.0f), sums[i]);
      sums[i] = fmaf(four.y, fmaxf(of_key[1], 0.0f), sums[i]);
      sums[i] = fmaf(four.z, fmaxf(of_key[4], 0.0f), sums[i]);
      sums[i] = fmaf(four.w, fmaxf(of_key[5], 0.0f), sums[i]);
    }
  }
}

// The logit, but for the key's scale, of one of this thread's two keys (t % 2) and one of `kRows`
// rows (t / 2); of one row in t and t + 2.
template <typename F, int32_t kRows>
__device__ float Score(const Shared<F>& shared, int32_t row, const uint32_t (&a)[F::kSteps][4]) {
  float d[kRows * kHeads / 2];
  KeepSums(d);
  BeginProducts();
#pragma unroll
  for (int32_t s = 0; s < F::kSteps; ++s) {
    constexpr int32_t kOfLine = kLineBytes / kStepBytes;
    const uint64_t b = DescribeRows(shared.q[row / F::kTogether][s / kOfLine]) +
                       static_cast<uint64_t>(s % kOfLine * kStepBytes / 16);
    if constexpr (F::kFloat8) {
      MultiplyFloat8(d, a[s], b, s > 0);
    } else {
      MultiplyNarrow(d, a[s], b, s > 0);
    }
  }
  CommitProducts();
  WaitForProducts<0>();
  KeepSums(d);
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  float of_key[kRows];
#pragma unroll
  for (int32_t r = 0; r < kRows; ++r) {
    float sums[2];
    SumHeads(d + r * kHeads / 2, shared.weights[row + r], sums);
    const float theirs = __shfl_xor_sync(kFullWarp, t % 2 == 0 ? sums[1] : sums[0], 1);
    of_key[r] = (t % 2 == 0 ? sums[0] : sums[1]) + theirs;
  }
  if constexpr (kRows == 1) {
    return of_key[0] + __shfl_xor_sync(kFullWarp, of_key[0], 2);
  } else {
    const float theirs = __shfl_xor_sync(kFullWarp, t < 2 ? of_key[1] : of_key[0], 2);
    return (t < 2 ? of_key[0] : of_key[1]) + theirs;
  }
}

template <typename F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    IndexProductsKernel(const __grid_constant__ IndexerLogitsParams params, Fault* fault) {
  const uint32_t behind_boundary = SharedAddress(DynamicShared()) % kBoxAlignment;
  auto& shared = *reinterpret_cast<Shared<F>*>(DynamicShared() +
                                               (kBoxAlignment - behind_boundary) % kBoxAlignment);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warpgroup = Common(thread / kWarpgroupThreads);
  // Another one of each warpgroup, for these warps are busier.
  const bool sends = Common(thread / kWarpSize % 4) == warpgroup;
  if (thread < F::kWarpgroups * F::kStages) {
    InitBarrier(&shared.full[thread / F::kStages][thread % F::kStages],
                kKeys / min(params.pages.block_size, kKeys));
  }
  PublishBarriers();
  TileShare<F::kRunRows> share = FindShare<F::kRunRows>(params, shared.warp_tiles);
  IndexRun run;
  if (share.begin < share.end) run = share.cursor.Find(params, share.begin);
  // Every kWarpgroups-th tile is this warpgroup's.
  int32_t index = share.begin + warpgroup;
  Sender<F> sender(params, fault, share.end, share.cursor, run);
  if (sends) sender.FindAhead(index);
  WaitForPrevious();
  if (share.begin == share.end) return;
  const int32_t t = thread % 4;
  const int32_t first_key = thread % kWarpgroupThreads / kWarpSize * 16 + thread % kWarpSize / 4;
  const int32_t my_key = first_key + 8 * (t % 2);
  RingPosition<F::kStages> position;
  // Before the keys, which would be in their way.
  if constexpr (F::kAhead) SendForRow(shared, params, run.first_row);
  if (sends) {
    for (int32_t stage = 0; stage < F::kStages; ++stage) {
      sender.Send(index + stage * F::kWarpgroups, shared.tiles[warpgroup][stage],
                  &shared.full[warpgroup][stage]);
    }
  }
  for (;;) {
    LoadRows(shared, params, run);
    __syncthreads();
    // Probably the next run's first row.
    const int32_t next_row = run.first_row + run.num_rows;
    if constexpr (F::kAhead) {
      if (run.end_tile < share.end) SendForRow(shared, params, next_row);
    }
    const int32_t end = min(run.end_tile, share.end);
    for (; index < end; index += F::kWarpgroups) {
      Barrier* full = &shared.full[warpgroup][position.stage];
      Tile<F::kFloat8>& tile = shared.tiles[warpgroup][position.stage];
      uint32_t a[F::kSteps][4];
      WaitFor(full, position.parity);
      TakeKeys(tile, first_key, a);
      const float scale = params.scale * (F::kFloat8 ? tile.scales[my_key] : 1.0f);
      SyncWarpgroup(warpgroup);
      if (sends) sender.Send(index + F::kStages * F::kWarpgroups, tile, full);
      position.Advance();
      const int32_t key = (index - run.first_tile) * kKeys + my_key;
      const auto store = [&](int32_t row, float score) {
        if (key >= shared.num_keys[row]) return;
        params.logits[(run.first_row + row) * params.logits_stride + key] = score * scale;
      };
      int32_t row = 0;
      if constexpr (F::kTogether == 2) {
#pragma unroll 1
        for (; row + 1 < run.num_rows; row += 2) {
          store(row + t / 2, Score<F, 2>(shared, row, a));
        }
      }
#pragma unroll 1
      for (; row < run.num_rows; ++row) {
        const float score = Score<F, 1>(shared, row, a);
        if (t < 2) store(row, score);
      }
    }
    if (end == share.end) return;
    run = share.cursor.Find(params, end);
    if constexpr (F::kAhead) {
      if (run.first_row != next_row) {
        WaitForRow();
        SendForRow(shared, params, run.first_row);
      }
    }
    __syncthreads();  // nobody reads the rows before
  }
}

}  // namespace

bool CanRunIndexProducts(const IndexerLogitsParams& params) {
  const KvPages& pages = params.pages;
  const bool has_format =
      pages.format == KvFormat::kFp8IndexKey ||
      (pages.format == KvFormat::kBfloat16 && pages.entry_bytes == Format<false>::kKeyBytes);
  const bool has_pieces =
      pages.block_size % 4 == 0 && (pages.block_size % kKeys == 0 || kKeys % pages.block_size == 0);
  return params.num_heads == kHeads && params.head_dim == kDim && has_format && has_pieces &&
         pages.block_stride % 16 == 0 && reinterpret_cast<uintptr_t>(pages.base) % 16 == 0 &&
         params.q_row_stride % 4 == 0 && params.q_head_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(params.q) % 16 == 0;
}

absl::Status IndexProducts(const Launcher& launcher, const IndexerLogitsParams& params) {
  const int64_t tiles = CeilDiv(params.logits_stride, int64_t{kKeys}) * params.rows.num_rows;
  const auto blocks = static_cast<uint32_t>(std::min<int64_t>(tiles, launcher.device.num_sms));
  const auto launch = [&]<typename F>(F) {
    return Launch(launcher, "indexer_logits", IndexProductsKernel<F>,
                  {.grid = dim3(blocks),
                   .threads = F::kThreads,
                   .shared_bytes = sizeof(Shared<F>) + kBoxAlignment,
                   .early = true},
                  params, launcher.device.fault);
  };
  if (params.pages.format != KvFormat::kFp8IndexKey) return launch(Bfloat16Keys());
  if (params.rows.num_rows <= kFewRows) return launch(FewRows());
  return params.rows.num_rows <= kDecodeRows ? launch(DecodeRows()) : launch(ManyRows());
}

}  // namespace kernels::cuda

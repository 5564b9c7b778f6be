#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/weight_ring.cuh"

namespace kernels::cuda {
namespace {

constexpr int32_t kSteps = 4;  // of a chunk

// A shared expert's inner dimension is cut into pieces of about a routed expert's.
struct Pieces {
  int32_t count[kMaxSharedExperts];
  int32_t total;
};
__host__ __device__ inline Pieces CutShared(const StreamExperts& experts) {
  Pieces pieces{};
  for (int32_t s = 0; s < experts.num_shared; ++s) {
    pieces.count[s] =
        static_cast<int32_t>(CeilDiv(experts.shared_intermediate[s], experts.intermediate_size));
    pieces.total += pieces.count[s];
  }
  return pieces;
}

// In shared memory.  A product is that of one row and one piece of a shared expert, or of one pair;
// its place is piece * rows + row, or after all those the pair's place by expert.
struct Tables {
  float* products;  // [products, 16]
  float* weights;   // [pairs]
  int32_t* counts;  // [bound] of each active expert's pairs
  int32_t* listed;  // [bound, rows] these
  int32_t* place;   // [pairs] of the pair's product
  int32_t* pairs;   // [pairs], by expert
  int32_t* begin;   // [bound + 1] of each active expert in these
};

__host__ __device__ inline size_t LayOut(std::byte* base, int32_t num_rows, int32_t num_pairs,
                                         int32_t num_pieces, int32_t bound, Tables& tables) {
  std::byte* next = base;
  const auto take = [&](auto*& pointer, int32_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(next);
    next += CeilDiv(sizeof(T) * static_cast<size_t>(count), size_t{16}) * 16;
  };
  take(tables.products, (num_pieces * num_rows + num_pairs) * kStreamRows);
  take(tables.weights, num_pairs);
  take(tables.counts, bound);
  take(tables.listed, bound * num_rows);
  take(tables.place, num_pairs);
  take(tables.pairs, num_pairs);
  take(tables.begin, bound + 1);
  return static_cast<size_t>(next - base);
}

// Has the choices copied to shared memory, as this thread's oldest copies.
__device__ void SendForChoices(const MoeStreamArgs& args, const Tables& tables) {
  const auto copy = [](auto* to, const auto* from, int32_t count, int32_t stride) {
    for (int32_t i = threadIdx.x; i < count; i += kStreamThreads) {
      CopyWordAsync(static_cast<uint32_t>(__cvta_generic_to_shared(to + i)), from + i * stride);
    }
  };
  const MoeStreamWorkspace& work = args.work;
  constexpr auto kStride = static_cast<int32_t>(sizeof(ActiveExpert) / sizeof(int32_t));
  copy(tables.counts, &work.active->count, args.bound, kStride);
  copy(tables.listed, work.active_pairs, args.bound * args.num_rows, 1);
  copy(tables.weights, work.weights, args.num_rows * args.top_k, 1);
  CommitCopies();
}

// The rest, from these.
__device__ void FillTables(const MoeStreamArgs& args, int32_t num_pieces, const Tables& tables) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  if (threadIdx.x < kWarpSize) {
    int32_t total = 0;
    for (int32_t begin = 0; begin < args.bound; begin += kWarpSize) {
      int32_t end = begin + lane < args.bound ? tables.counts[begin + lane] : 0;
      for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
        const int32_t other = __shfl_up_sync(kFullWarp, end, offset);
        if (lane >= offset) end += other;
      }
      if (begin + lane < args.bound) tables.begin[begin + lane + 1] = total + end;
      total += __shfl_sync(kFullWarp, end, kWarpSize - 1);
    }
    if (lane == 0) tables.begin[0] = 0;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < args.bound * args.num_rows; i += kStreamThreads) {
    const int32_t active = i / args.num_rows, place = tables.begin[active] + i % args.num_rows;
    if (place >= tables.begin[active + 1]) continue;
    const int32_t pair = tables.listed[i];
    tables.pairs[place] = pair;
    tables.place[pair] = num_pieces * args.num_rows + place;
  }
  __syncthreads();
}

// One warp's unit of work: a piece of a shared expert, or an active expert.
struct Unit {
  StreamedMatrix down;  // null: there is no such unit
  const uint16_t* activated;
  int32_t intermediate;
  StepRange steps;
  int32_t active;  // -1: every row, of a shared expert

  __device__ bool is_shared() const { return active < 0; }
};

template <ExpertFormats kFormats>
__device__ Unit UnitAt(const MoeStreamArgs& args, const Pieces& pieces, int32_t index) {
  const StreamExperts& experts = args.experts;
  if (index >= pieces.total) {
    const int32_t active = index - pieces.total;
    if (active >= args.bound) return {};
    const ActiveExpert expert = args.work.active[active];
    const auto intermediate = static_cast<int32_t>(experts.intermediate_size);
    return {expert.count > 0 ? expert.weights.down : StreamedMatrix{},
            args.work.activated,
            intermediate,
            {0, intermediate / StepDepthOf(RoutedFormat(kFormats))},
            active};
  }
  const uint16_t* activated = args.work.shared_activated;
  int32_t s = 0;
  for (; index >= pieces.count[s]; ++s) {
    index -= pieces.count[s];
    activated += args.num_rows * experts.shared_intermediate[s];
  }
  const auto intermediate = static_cast<int32_t>(experts.shared_intermediate[s]);
  const int32_t steps = intermediate / StepDepthOf(SharedFormat(kFormats));
  return {experts.shared[s].down,
          activated,
          intermediate,
          {steps * index / pieces.count[s], steps * (index + 1) / pieces.count[s]},
          -1};
}

// Sends for a warp's weights: every kStreamWarps-th unit, as often as its rows are taken.
template <ExpertFormats kFormats, typename Ring, int32_t kRows>
class Sender {
 public:
  __device__ Sender(const MoeStreamArgs& args, const Pieces& pieces)
      : args_(args), pieces_(pieces), index_(static_cast<int32_t>(threadIdx.x) / kWarpSize) {
    next_ = UnitAt<kFormats>(args_, pieces_, index_);
    Enter();
  }

  __device__ void Send(Ring& ring) {
    if (!is_left_) {
      ring.PushNothing();
      return;
    }
    ring.Push(rows_, step_, steps_.end - step_);
    step_ += kSteps;
    if (step_ < steps_.end) return;
    left_ -= kRows;
    if (left_ > 0) {
      step_ = steps_.begin;
    } else {
      Enter();
    }
  }

 private:
  // The unit whose addresses were asked for when the one before began.
  __device__ void Enter() {
    steps_ = next_.steps;
    step_ = steps_.begin;
    is_left_ = next_.down.data != nullptr;
    left_ = next_.is_shared() ? args_.num_rows
            : is_left_        ? args_.work.active[next_.active].count
                              : 0;
    const auto row_at = [&](int32_t i) {
      return StreamedRow{next_.down, int64_t{blockIdx.x} * kStreamRows + i};
    };
    rows_ = next_.is_shared() ? LineUp<SharedFormat(kFormats)>(next_.intermediate, row_at)
                              : LineUp<RoutedFormat(kFormats)>(next_.intermediate, row_at);
    index_ += kStreamWarps;
    next_ = UnitAt<kFormats>(args_, pieces_, index_);
  }

  const MoeStreamArgs& args_;
  const Pieces& pieces_;
  int32_t index_;
  Unit next_;
  LaneRows rows_;
  bool is_left_;  // a unit
  StepRange steps_;
  int32_t step_;
  int32_t left_;
};

template <ExpertFormats kFormats, int32_t kDepth>
using RingFor = WeightRing<kSteps, kDepth, kFormats != ExpertFormats::kBfloat16>;

// Grid: tiles of 16 columns.  Shared: the ring and the tables.  A row's contributions are added in
// the order of its experts, the shared ones last, whatever warp computed them.
template <ExpertFormats kFormats, int32_t kTiles, int32_t kDepth>
__global__ void __launch_bounds__(kStreamThreads, 1)
    DownKernel(const __grid_constant__ MoeStreamArgs args) {
  using Ring = RingFor<kFormats, kDepth>;
  constexpr WeightFormat kShared = SharedFormat(kFormats), kRouted = RoutedFormat(kFormats);
  constexpr int32_t kRows = kTiles * kTokensPerTile;
  Ring ring(DynamicShared(), args.weight_policy);
  Tables tables;
  const Pieces pieces = CutShared(args.experts);
  LayOut(DynamicShared() + Ring::kBytes, args.num_rows, args.num_rows * args.top_k, pieces.total,
         args.bound, tables);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  // The choices were made by the kernel before the previous one, so weights may set out now.
  SendForChoices(args, tables);
  Sender<kFormats, Ring, kRows> sender(args, pieces);
  for (int32_t i = 0; i < kDepth; ++i) sender.Send(ring);
  WaitForCopies<kDepth>();
  __syncthreads();
  FillTables(args, pieces.total, tables);
  WaitForPrevious();
  // A thread a result, whose residual is under way during the products.
  static_assert(kMaxStreamTokens * kStreamRows <= kStreamThreads);
  const auto row = static_cast<int32_t>(threadIdx.x) / kStreamRows;
  const int32_t c = static_cast<int32_t>(threadIdx.x) % kStreamRows;
  const int64_t column = int64_t{blockIdx.x} * kStreamRows + c;
  float residual = 0;
  if (row < args.num_rows && args.input != nullptr) {
    residual = args.input[row * args.input_row_stride + column];
  }
  for (int32_t index = warp;; index += kStreamWarps) {
    const Unit unit = UnitAt<kFormats>(args, pieces, index);
    if (unit.down.data == nullptr) break;
    const bool is_shared = unit.is_shared();
    const int32_t lane_values =
        is_shared ? StepActivations<kShared>::kValues : StepActivations<kRouted>::kValues;
    const int32_t begin = is_shared ? 0 : tables.begin[unit.active];
    const int32_t count = is_shared ? args.num_rows : tables.begin[unit.active + 1] - begin;
    const int32_t place = is_shared ? index * args.num_rows : pieces.total * args.num_rows + begin;
    const int32_t step_values = StepDepthOf(is_shared ? kShared : kRouted);
    for (int32_t i = 0; i < count; ++i) {
      const int64_t at = is_shared ? i : tables.pairs[begin + i];
      FetchRow(unit.activated + at * unit.intermediate + unit.steps.begin * step_values,
               (unit.steps.end - unit.steps.begin) * step_values);
    }
    for (int32_t first = 0; first < count; first += kRows) {
      float sums[kTiles][4] = {};
      const uint16_t* x[kTiles];
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        const int32_t mine = min(first + i * kTokensPerTile + g, count - 1);
        const int64_t at = is_shared ? mine : tables.pairs[begin + mine];
        x[i] = unit.activated + at * unit.intermediate + lane_values * t;
      }
      const int32_t tiles = CeilDiv(count - first, kTokensPerTile);
      const auto send = [&] { sender.Send(ring); };
      if (kShared != kRouted && is_shared) {
        ring.template MultiplyAll<kShared, HoldsTwoChunks(kShared)>(sums, x, tiles, unit.steps,
                                                                    send);
      } else {
        ring.template MultiplyAll<kRouted, HoldsTwoChunks(kRouted)>(sums, x, tiles, unit.steps,
                                                                    send);
      }
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t mine = first + i * kTokensPerTile + 2 * t + j;
          if (mine >= count) continue;
          float* product = tables.products + (place + mine) * kStreamRows;
          product[g] = sums[i][j];
          product[g + kStreamRows / 2] = sums[i][2 + j];
        }
      }
    }
  }
  __syncthreads();
  if (row >= args.num_rows) return;
  float sum = 0;
  for (int32_t pair = row * args.top_k; pair < (row + 1) * args.top_k; ++pair) {
    sum += tables.weights[pair] * tables.products[tables.place[pair] * kStreamRows + c];
  }
  for (int32_t p = 0; p < pieces.total; ++p) {
    sum += tables.products[(p * args.num_rows + row) * kStreamRows + c];
  }
  args.output[row * args.output_row_stride + column] = residual + sum;
}

constexpr int32_t kTiles = 1;
constexpr int32_t kDepth = 6;
static_assert(kMaxStreamTokens <= kTiles * kTokensPerTile);

}  // namespace

size_t DownSharedBytes(const MoeStreamArgs& args) {
  Tables tables;
  return (args.experts.formats == ExpertFormats::kBfloat16
              ? RingFor<ExpertFormats::kBfloat16, kDepth>::kBytes
              : RingFor<ExpertFormats::kFloat8, kDepth>::kBytes) +
         LayOut(nullptr, args.num_rows, args.num_rows * args.top_k, CutShared(args.experts).total,
                args.bound, tables);
}

absl::Status StreamDown(const Launcher& launcher, const MoeStreamArgs& args) {
  const LaunchShape shape{
      .grid = dim3(static_cast<uint32_t>(args.experts.hidden_size / kStreamRows)),
      .threads = kStreamThreads,
      .shared_bytes = DownSharedBytes(args),
      .early = true};
  const ExpertFormats formats = args.experts.formats;
  const auto kernel =
      formats == ExpertFormats::kFloat4   ? DownKernel<ExpertFormats::kFloat4, kTiles, kDepth>
      : formats == ExpertFormats::kFloat8 ? DownKernel<ExpertFormats::kFloat8, kTiles, kDepth>
                                          : DownKernel<ExpertFormats::kBfloat16, kTiles, kDepth>;
  return Launch(launcher, "moe down", kernel, shape, args);
}

}  // namespace kernels::cuda

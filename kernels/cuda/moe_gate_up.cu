#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/weight_ring.cuh"

namespace kernels::cuda {
namespace {

// 8 columns of an expert, all of its rows.  kKeptChunks: of a warp's part of a row, if KeptRows has
// it; or 0.
template <ExpertFormats kFormats_, int32_t kKeptChunks_>
struct Shape {
  static constexpr ExpertFormats kFormats = kFormats_;
  static constexpr int32_t kKeptChunks = kKeptChunks_;
  static constexpr bool kKeepsRows = kKeptChunks > 0;
  static constexpr int32_t kSteps = 4;  // of a chunk
  static constexpr int32_t kDepth = 6;
  static constexpr int32_t kColumns = kStreamRows / 2;
  using Ring = WeightRing<kSteps, kDepth, kFormats != ExpertFormats::kBfloat16>;
  static constexpr size_t kSumBytes = sizeof(WarpSums<1>) * 2;
};
static_assert(kMaxStreamTokens <= kTokensPerTile);

// An expert with rows, in shared memory: the shared ones, then the active ones.
struct Expert {
  StreamedMatrix gate;
  StreamedMatrix up;
  const int32_t* pairs;  // null: every row
  uint16_t* activated;   // by pair, or by row
  int32_t intermediate;
  int32_t tiles;  // of its columns
  int32_t count;  // of rows

  __device__ bool is_shared() const { return pairs == nullptr; }
};

// A position in a block's work: every gridDim.x-th tile of the experts' columns.
template <typename S>
class Cursor {
 public:
  __device__ explicit Cursor(const Expert* experts)
      : experts_(experts), tile_(static_cast<int32_t>(blockIdx.x)) {}

  // Where the position is among the first `num_experts`; false: past them.
  __device__ bool Find(int32_t num_experts) {
    while (expert_ < num_experts && tile_ >= experts_[expert_].tiles) {
      tile_ -= experts_[expert_++].tiles;
    }
    return expert_ < num_experts;
  }
  __device__ void Next() { tile_ += static_cast<int32_t>(gridDim.x); }

  __device__ const Expert& expert() const { return experts_[expert_]; }
  __device__ int32_t column() const { return tile_ * S::kColumns; }

 private:
  const Expert* const experts_;
  int32_t expert_ = 0;
  int32_t tile_;  // from the expert's first
};

// Adds the active experts to the table; returns how many there are.
template <typename S>
__device__ int32_t ListActive(const MoeStreamArgs& args, Expert* experts) {
  int32_t num_active = 0;
  for (int32_t begin = 0; begin < args.bound; begin += kStreamThreads) {
    const int32_t a = begin + static_cast<int32_t>(threadIdx.x);
    bool mine = false;
    if (a < args.bound) {
      const ActiveExpert active = args.work.active[a];
      mine = active.count > 0;
      experts[a] = {active.weights.gate,
                    active.weights.up,
                    args.work.active_pairs + int64_t{a} * args.num_rows,
                    args.work.activated,
                    static_cast<int32_t>(args.experts.intermediate_size),
                    static_cast<int32_t>(args.experts.intermediate_size) / S::kColumns,
                    active.count};
    }
    num_active += __syncthreads_count(mine);
  }
  return num_active;
}

// The warp's steps of an expert's depth; a shared one is one of `is_shared`.
template <ExpertFormats kFormats>
__device__ StepRange StepsOf(int64_t hidden, bool is_shared) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t depth = StepDepthOf(is_shared ? SharedFormat(kFormats) : RoutedFormat(kFormats));
  return StepsOfWarp(static_cast<int32_t>(hidden) / depth, warp);
}

// Values of a step that a lane holds of an activation row.
template <ExpertFormats kFormats>
__device__ int32_t ValuesOfLane(bool is_shared) {
  return is_shared ? StepActivations<SharedFormat(kFormats)>::kValues
                   : StepActivations<RoutedFormat(kFormats)>::kValues;
}

// Sends for a warp's weights, chunk by chunk.
template <typename S>
class Sender {
 public:
  __device__ Sender(const MoeStreamArgs& args, const Expert* experts)
      : hidden_(args.experts.hidden_size), cursor_(experts) {}

  // False: nothing is left of the first `num_experts`.
  __device__ bool Send(typename S::Ring& ring, int32_t num_experts) {
    if (step_ == steps_.end) {
      if (!cursor_.Find(num_experts)) return false;
      const Expert& expert = cursor_.expert();
      const auto row_at = [&](int32_t i) {
        constexpr int32_t kHalf = kStreamRows / 2;
        return StreamedRow{i < kHalf ? expert.gate : expert.up, cursor_.column() + i % kHalf};
      };
      rows_ = expert.is_shared() ? LineUp<SharedFormat(S::kFormats)>(hidden_, row_at)
                                 : LineUp<RoutedFormat(S::kFormats)>(hidden_, row_at);
      steps_ = StepsOf<S::kFormats>(hidden_, expert.is_shared());
      step_ = steps_.begin;
    }
    ring.Push(rows_, step_, steps_.end - step_);
    step_ = min(step_ + S::kSteps, steps_.end);
    if (step_ == steps_.end) cursor_.Next();
    return true;
  }

 private:
  const int64_t hidden_;
  StepRange steps_ = {0, 0};
  Cursor<S> cursor_;
  int32_t step_ = 0;  // the end: of a tile to be found
  LaneRows rows_;
};

// A warp's part of every row, in registers.  A product has eight columns, however few rows an
// expert has: so where they fit, all rows are multiplied, and nothing is loaded between weights.
template <typename S>
class KeptRows {
 public:
  __device__ void Load(const MoeStreamArgs& args, StepRange steps) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    const int32_t row = min(lane / 4, args.num_rows - 1);
    const uint16_t* const x[1] = {args.work.normed + row * args.experts.hidden_size +
                                  StepActivations<kFormat>::kValues * (lane % 4)};
#pragma unroll
    for (int32_t c = 0; c < S::kKeptChunks; ++c) {
      const int32_t step = steps.begin + c * S::kSteps;
      S::Ring::template Load<kFormat>(chunks_[c], x, 1, step, steps.end - step);
    }
  }
  template <typename Send>
  __device__ void Multiply(const typename S::Ring& ring, float (&sums)[1][4], StepRange steps,
                           Send send) const {
#pragma unroll
    for (int32_t c = 0; c < S::kKeptChunks; ++c) {
      const int32_t left = steps.end - steps.begin - c * S::kSteps;
      if (left <= 0) break;
      ring.template Multiply<kFormat>(sums, chunks_[c], 1, left);
      send();
    }
  }

 private:
  static constexpr WeightFormat kFormat = RoutedFormat(S::kFormats);
  typename S::Ring::template Activations<kFormat, 1> chunks_[S::kKeepsRows ? S::kKeptChunks : 1];
};

// Where column `i` of the sums goes among the expert's results; -1: nowhere.
template <typename S>
__device__ int64_t PlaceOfSums(const MoeStreamArgs& args, const Expert& expert, int32_t i) {
  if (expert.is_shared() || !S::kKeepsRows) {
    if (i >= expert.count) return -1;
    return expert.is_shared() ? i : expert.pairs[i];
  }
  for (int32_t p = 0; p < expert.count; ++p) {
    if (expert.pairs[p] / args.top_k == i) return expert.pairs[p];
  }
  return -1;
}

// Grid: as many blocks as run at once.  Shared: the ring, the warps' sums, the experts.
template <typename S>
__global__ void __launch_bounds__(kStreamThreads, 1)
    GateUpKernel(const __grid_constant__ MoeStreamArgs args) {
  std::byte* memory = DynamicShared();
  typename S::Ring ring(memory, args.weight_policy);
  auto* reduce = reinterpret_cast<WarpSums<1>*>(memory + S::Ring::kBytes);
  auto* experts = reinterpret_cast<Expert*>(memory + S::Ring::kBytes + S::kSumBytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t g = lane / 4, t = lane % 4;
  const int64_t hidden = args.experts.hidden_size;
  int32_t num_experts = args.experts.num_shared;
  if (threadIdx.x == 0) {
    uint16_t* activated = args.work.shared_activated;
    for (int32_t s = 0; s < num_experts; ++s) {
      const auto intermediate = static_cast<int32_t>(args.experts.shared_intermediate[s]);
      experts[s] = {args.experts.shared[s].gate,
                    args.experts.shared[s].up,
                    nullptr,
                    activated,
                    intermediate,
                    intermediate / S::kColumns,
                    args.num_rows};
      activated += int64_t{args.num_rows} * intermediate;
    }
  }
  __syncthreads();
  Sender<S> sender(args, experts);
  // The shared experts' weights set out before the rows and their experts are known.
  int32_t sent = 0;
  while (sent < S::kDepth && sender.Send(ring, num_experts)) ++sent;
  WaitForPrevious();
  const StepRange warp_steps = StepsOf<S::kFormats>(hidden, /*is_shared=*/false);
  KeptRows<S> kept;
  if constexpr (S::kKeepsRows) {
    kept.Load(args, warp_steps);
  } else {
    constexpr int32_t kStepValues = StepDepthOf(RoutedFormat(S::kFormats));
    for (int32_t row = 0; row < args.num_rows; ++row) {
      FetchRow(args.work.normed + row * hidden + warp_steps.begin * kStepValues,
               (warp_steps.end - warp_steps.begin) * kStepValues);
    }
  }
  num_experts += ListActive<S>(args, experts + num_experts);
  const auto send = [&] {
    if (!sender.Send(ring, num_experts)) ring.PushNothing();
  };
  for (; sent < S::kDepth; ++sent) send();

  int32_t buffer = 0;
  Cursor<S> cursor(experts);
  for (; cursor.Find(num_experts); cursor.Next(), buffer ^= 1) {
    const Expert& expert = cursor.expert();
    float sums[1][4] = {};
    constexpr WeightFormat kShared = SharedFormat(S::kFormats);
    constexpr WeightFormat kRouted = RoutedFormat(S::kFormats);
    if (S::kKeepsRows && (kShared == kRouted || !expert.is_shared())) {
      kept.Multiply(ring, sums, warp_steps, send);
    } else {
      const int32_t mine = min(g, expert.count - 1);
      const int64_t row = expert.is_shared() ? mine : expert.pairs[mine] / args.top_k;
      const uint16_t* const x[1] = {args.work.normed + row * hidden +
                                    t * ValuesOfLane<S::kFormats>(expert.is_shared())};
      const StepRange steps = StepsOf<S::kFormats>(hidden, expert.is_shared());
      if (kShared != kRouted && expert.is_shared()) {
        ring.template MultiplyAll<kShared, HoldsTwoChunks(kShared)>(sums, x, 1, steps, send);
      } else if constexpr (!S::kKeepsRows) {
        ring.template MultiplyAll<kRouted, HoldsTwoChunks(kRouted)>(sums, x, 1, steps, send);
      }
    }
    const float4 total = ReduceOverWarps<1>(sums, reduce[buffer]);
    if (warp > 0) continue;
    const int32_t column = cursor.column() + g;
    const float values[2] = {SwiGlu(total.x, total.z, args.swiglu_limit),
                             SwiGlu(total.y, total.w, args.swiglu_limit)};
    for (int32_t j = 0; j < 2; ++j) {
      const int64_t to = PlaceOfSums<S>(args, expert, 2 * t + j);
      if (to < 0) continue;
      expert.activated[to * expert.intermediate +
                       ActivationPlace(RoutedFormat(S::kFormats), column)] =
          static_cast<uint16_t>(PackBfloat16(values[j], 0));
    }
  }
}

template <typename S>
size_t SharedBytes(const MoeStreamArgs& args) {
  return S::Ring::kBytes + S::kSumBytes +
         sizeof(Expert) * static_cast<size_t>(kMaxSharedExperts + args.bound);
}
template <typename S>
absl::Status LaunchGateUp(const Launcher& launcher, const MoeStreamArgs& args) {
  return Launch(launcher, "moe gate_up", GateUpKernel<S>,
                {.grid = dim3(static_cast<uint32_t>(launcher.device.num_sms)),
                 .threads = kStreamThreads,
                 .shared_bytes = SharedBytes<S>(args),
                 .early = true},
                args);
}

// With rows kept, if a warp's part of one is of no more than kKeptChunks.
template <ExpertFormats kFormats, int32_t kKeptChunks>
absl::Status LaunchFormats(const Launcher& launcher, const MoeStreamArgs& args) {
  using Kept = Shape<kFormats, kKeptChunks>;
  const int64_t kept =
      int64_t{kStreamWarps} * kKeptChunks * Kept::kSteps * StepDepthOf(RoutedFormat(kFormats));
  return args.experts.hidden_size <= kept ? LaunchGateUp<Kept>(launcher, args)
                                          : LaunchGateUp<Shape<kFormats, 0>>(launcher, args);
}

}  // namespace

size_t GateUpSharedBytes(const MoeStreamArgs& args) {
  return args.experts.formats == ExpertFormats::kBfloat16
             ? SharedBytes<Shape<ExpertFormats::kBfloat16, 0>>(args)
             : SharedBytes<Shape<ExpertFormats::kFloat8, 0>>(args);
}

absl::Status StreamGateUp(const Launcher& launcher, const MoeStreamArgs& args) {
  switch (args.experts.formats) {
    case ExpertFormats::kFloat4:
      return LaunchFormats<ExpertFormats::kFloat4, 1>(launcher, args);
    case ExpertFormats::kFloat8:
      return LaunchFormats<ExpertFormats::kFloat8, 4>(launcher, args);
    case ExpertFormats::kBfloat16:
      break;
  }
  return LaunchFormats<ExpertFormats::kBfloat16, 2>(launcher, args);
}

}  // namespace kernels::cuda

// Weights on their way from memory to fragments (weight_stream.cuh) through shared memory: a ring
// of chunks for every lane, which only that lane writes and reads, so that nobody waits for
// another; the scales of a warp's rows lie beside, which its lanes share.  As much of a
// multiprocessor's memory bandwidth as the ring holds is under way, across the ends of tiles, and
// before the kernel's other inputs exist.

#ifndef KERNELS_CUDA_WEIGHT_RING_CUH_
#define KERNELS_CUDA_WEIGHT_RING_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/weight_format.h"
#include "kernels/cuda/weight_stream.cuh"
#include "kernels/cuda/widened_step.cuh"

namespace kernels::cuda {

// A word of scales to an address of shared memory, in the background.
__device__ inline void CopyWordAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(from));
}

// Has 2 * count bytes of an activation row set out for the first-level cache, a warp's work: later
// loads of it don't wait for memory one after the other.
__device__ inline void FetchRow(const uint16_t* row, int32_t count) {
  constexpr int32_t kLineValues = 64;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t i = lane * kLineValues; i < count; i += kWarpSize * kLineValues) {
    // Relaxed, so that nobody leaves out a load of which nothing is used.
    asm volatile("{\n.reg .b32 unused;\nld.relaxed.cta.global.u32 unused, [%0];\n}"
                 :
                 : "l"(row + i));
  }
}

// What a lane sends for of 16 weight rows.
struct LaneRows {
  const std::byte* top = nullptr;     // row g from byte 16 t on
  const std::byte* bottom = nullptr;  // row g + 8
  const std::byte* scales = nullptr;  // row lane % 16's first word
  int32_t scale_shift = 0;            // a word of scales is of 2^this steps
};
struct StreamedRow {
  StreamedMatrix matrix;
  int64_t row;
};
// row_at(i) gives row i of the 16, a StreamedRow.
template <WeightFormat kFormat, typename RowAt>
__device__ LaneRows LineUp(int64_t depth, RowAt row_at) {
  constexpr int32_t kStepBytes = 64;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t row_bytes = depth / StepDepthOf(kFormat) * kStepBytes;
  const auto from = [&](const StreamedRow& at) {
    return at.matrix.data + at.row * row_bytes + 16 * (lane % 4);
  };
  LaneRows rows = {from(row_at(lane / 4)), from(row_at(lane / 4 + kStreamRows / 2)), nullptr, 0};
  if constexpr (kFormat == WeightFormat::kFloat8) {
    const StreamedRow at = row_at(lane % kStreamRows);
    rows.scales = at.matrix.scales + at.row / 128 * CeilDiv(depth, int64_t{128}) * 4;
    rows.scale_shift = 1;
  } else if constexpr (kFormat == WeightFormat::kFloat4) {
    const StreamedRow at = row_at(lane % kStreamRows);
    rows.scales = at.matrix.scales + at.row * (depth / 32);
  }
  return rows;
}

// Whether a lane's registers hold the activations of two chunks.
constexpr bool HoldsTwoChunks(WeightFormat format) { return format != WeightFormat::kFloat4; }

// A chunk is kSteps steps of 16 rows; kDepth chunks are under way.
template <int32_t kSteps, int32_t kDepth, bool kScaled>
class WeightRing {
 public:
  static constexpr int32_t kPieceBytes = sizeof(Words4) * kStreamThreads;
  static constexpr int32_t kStepBytes = kPieceBytes * 2;
  static constexpr int32_t kSlotBytes = kStepBytes * kSteps;
  // A warp's scales of a chunk, words [kSteps][16]; a slot has every warp's.
  static constexpr int32_t kScaleBytes = kScaled ? 4 * kStreamRows * kSteps : 0;
  static constexpr int32_t kScaleSlotBytes = kScaleBytes * kStreamWarps;
  static constexpr size_t kBytes = size_t{kSlotBytes + kScaleSlotBytes} * kDepth;

  // `policy`: one of the kernel's parameters (cache_policy.h).
  __device__ WeightRing(std::byte* shared, CachePolicy policy)
      : policy_(policy),
        begin_(static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
               threadIdx.x * static_cast<uint32_t>(sizeof(Words4))),
        slot_(begin_),
        scales_begin_(static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
                      kSlotBytes * kDepth + threadIdx.x / kWarpSize * kScaleBytes),
        scales_(scales_begin_) {}

  // Sends for `count` steps from `step` on.
  __device__ void Push(const LaneRows& rows, int32_t step, int32_t count) {
    PushRow(slot_, rows.top + step * kRowStepBytes, count);
    PushRow(slot_ + kPieceBytes, rows.bottom + step * kRowStepBytes, count);
    if constexpr (kScaled) {
      const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
#pragma unroll
      for (int32_t i = 0; i < kSteps; i += kWarpSize / kStreamRows) {
        const int32_t s = i + lane / kStreamRows;
        if (s >= count) continue;
        CopyWordAsync(scales_ + 4 * (s * kStreamRows + lane % kStreamRows),
                      rows.scales + ((step + s) >> rows.scale_shift) * 4);
      }
    }
    PushNothing();
  }
  // A chunk that nobody will use.
  __device__ void PushNothing() {
    CommitCopies();
    const bool is_last = slot_ == begin_ + (kDepth - 1) * kSlotBytes;
    slot_ = is_last ? begin_ : slot_ + kSlotBytes;
    if constexpr (kScaled) scales_ = is_last ? scales_begin_ : scales_ + kScaleSlotBytes;
  }

  // A lane's activations for a chunk.
  template <WeightFormat kFormat, int32_t kTiles>
  using Activations = StepActivations<kFormat>[kSteps][kTiles];

  // Those from `step` on, of the first `tiles` of kTiles tiles; `x`, this lane's row of each from
  // its first value of a step on.
  template <WeightFormat kFormat, int32_t kTiles>
  __device__ static void Load(Activations<kFormat, kTiles>& activations,
                              const uint16_t* const (&x)[kTiles], int32_t tiles, int32_t step,
                              int32_t count) {
    constexpr int32_t kStepValues = StepDepthOf(kFormat);
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      if (i > 0 && i >= tiles) break;
      const uint16_t* row = x[i] + step * kStepValues;
#pragma unroll
      for (int32_t s = 0; s < kSteps; ++s) {
        if (s < count) activations[s][i].Load(row + s * kStepValues);
      }
    }
  }

  // Adds the products of the oldest chunks, steps `steps`, with activations as Load takes them;
  // also where there is no such row: its sums mean nothing.  send() pushes a chunk; it is called
  // for each that is multiplied.  kAhead: activations are loaded a chunk ahead, into registers of
  // their own.  REQUIRES: the ring is full.
  template <WeightFormat kFormat, bool kAhead, int32_t kTiles, typename Send>
  __device__ void MultiplyAll(float (&sums)[kTiles][4], const uint16_t* const (&x)[kTiles],
                              int32_t tiles, StepRange steps, Send send) const {
    Activations<kFormat, kTiles> next;
    if (kAhead) Load<kFormat, kTiles>(next, x, tiles, steps.begin, steps.end - steps.begin);
    for (int32_t step = steps.begin; step < steps.end; step += kSteps) {
      const int32_t left = steps.end - step;
      Activations<kFormat, kTiles> now;
      if constexpr (kAhead) {
#pragma unroll
        for (int32_t s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int32_t i = 0; i < kTiles; ++i) now[s][i] = next[s][i];
        }
        Load<kFormat, kTiles>(next, x, tiles, step + kSteps, left - kSteps);
      } else {
        Load<kFormat, kTiles>(now, x, tiles, step, left);
      }
      Multiply<kFormat, kTiles>(sums, now, tiles, left);
      send();
    }
  }

  // Adds the oldest chunk's products, of `count` steps; a Push comes next.  REQUIRES: the ring is
  // full.
  template <WeightFormat kFormat, int32_t kTiles>
  __device__ void Multiply(float (&sums)[kTiles][4],
                           const Activations<kFormat, kTiles>& activations, int32_t tiles,
                           int32_t count) const {
    static_assert(kScaled || kFormat == WeightFormat::kBfloat16);
    WaitForCopies<kDepth - 1>();
    if constexpr (kScaled) __syncwarp();
    // A product waits for the one whose sums it adds to, so every second step has sums of its own;
    // of codes a step's products begin at zero anyhow.
    constexpr bool kApart = kFormat == WeightFormat::kBfloat16;
    float odd[kTiles][4] = {};
    if (count >= kSteps) {
      MultiplySteps<kFormat>(sums, kApart ? odd : sums, activations, tiles,
                             std::make_integer_sequence<int32_t, kSteps>());
    } else {
#pragma unroll
      for (int32_t s = 0; s < kSteps; ++s) {
        if (s >= count) break;
        MultiplyOne<kFormat>(kApart && s % 2 == 1 ? odd : sums, activations[s], tiles, s);
      }
    }
    if constexpr (kApart) {
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) sums[i][j] += odd[i][j];
      }
    }
    if constexpr (kScaled) __syncwarp();
  }

 private:
  static constexpr int32_t kRowStepBytes = 64;

  __device__ void PushRow(uint32_t to, const std::byte* row, int32_t count) const {
    if (count >= kSteps) {
      PushSteps(to, row, std::make_integer_sequence<int32_t, kSteps>());
    } else {
      for (int32_t s = 0; s < count; ++s) {
        CopyAsyncStreaming<0, 0>(to + s * kStepBytes, row + s * kRowStepBytes, policy_);
      }
    }
  }
  template <int32_t... kS>
  __device__ void PushSteps(uint32_t to, const std::byte* row,
                            std::integer_sequence<int32_t, kS...>) const {
    (CopyAsyncStreaming<kS * kStepBytes, kS * kRowStepBytes>(to, row, policy_), ...);
  }
  template <WeightFormat kFormat, int32_t kTiles, int32_t... kS>
  __device__ void MultiplySteps(float (&sums)[kTiles][4], float (&odd)[kTiles][4],
                                const StepActivations<kFormat> (&activations)[kSteps][kTiles],
                                int32_t tiles, std::integer_sequence<int32_t, kS...>) const {
    (MultiplyOne<kFormat>(kS % 2 == 0 ? sums : odd, activations[kS], tiles, kS), ...);
  }
  template <WeightFormat kFormat, int32_t kTiles>
  __device__ void MultiplyOne(float (&sums)[kTiles][4], const StepActivations<kFormat> (&x)[kTiles],
                              int32_t tiles, int32_t s) const {
    const uint32_t from = slot_ + s * kStepBytes;
    const WidenedStep<kFormat> weights({LoadShared(from), LoadShared(from + kPieceBytes)},
                                       {scales_ + s * 4 * kStreamRows});
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      if (i == 0 || i < tiles) weights.Multiply(sums[i], x[i]);
    }
  }

  const CachePolicy policy_;
  const uint32_t begin_;  // this lane's first piece
  uint32_t slot_;         // where the next chunk goes; with the ring full, the oldest one
  const uint32_t scales_begin_;
  uint32_t scales_;  // the same of scales
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WEIGHT_RING_CUH_

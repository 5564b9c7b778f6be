// Weights on their way from memory to fragments (weight_stream.cuh) through shared memory: a ring
// of chunks for every lane, which only that lane writes and reads, so that nobody waits for
// another.  As much of a multiprocessor's memory bandwidth as the ring holds is under way, across
// the ends of tiles, and before the kernel's other inputs exist.

#ifndef KERNELS_CUDA_WEIGHT_RING_CUH_
#define KERNELS_CUDA_WEIGHT_RING_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {

// A chunk is kSteps steps of kRowTiles times 16 rows; kDepth chunks are under way.
template <int32_t kRowTiles, int32_t kSteps, int32_t kDepth>
class WeightRing {
 public:
  static constexpr int32_t kPieceBytes = sizeof(Words4) * kStreamThreads;
  static constexpr int32_t kStepBytes = kPieceBytes * 2 * kRowTiles;
  static constexpr int32_t kSlotBytes = kStepBytes * kSteps;
  static constexpr size_t kBytes = size_t{kSlotBytes} * kDepth;

  __device__ explicit WeightRing(std::byte* shared)
      : begin_(static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
               threadIdx.x * static_cast<uint32_t>(sizeof(Words4))),
        slot_(begin_) {}

  // Sends for `count` steps from `step` on: `rows`, this lane's of each half tile, from k 8t on.
  __device__ void Push(const uint16_t* const (&rows)[2 * kRowTiles], int32_t step, int32_t count) {
#pragma unroll
    for (int32_t i = 0; i < 2 * kRowTiles; ++i) {
      const uint16_t* row = rows[i] + step * kStepDepth;
      const uint32_t to = slot_ + i * kPieceBytes;
      if (count >= kSteps) {
        PushSteps(to, row, std::make_integer_sequence<int32_t, kSteps>());
      } else {
        for (int32_t s = 0; s < count; ++s) {
          CopyAsyncStreaming<0, 0>(to + s * kStepBytes, row + s * kStepDepth);
        }
      }
    }
    PushNothing();
  }
  // A chunk that nobody will use.
  __device__ void PushNothing() {
    CommitCopies();
    slot_ = slot_ == begin_ + (kDepth - 1) * kSlotBytes ? begin_ : slot_ + kSlotBytes;
  }

  // Adds the oldest chunk's products with the first `tiles` of kTiles tiles of activations; `x`,
  // this lane's row of each, from k 8t on, also where there is no such row: its sums mean nothing.
  // `step` and `count` as they were pushed.  REQUIRES: the ring is full.  A Push comes next.
  template <int32_t kTiles>
  __device__ void Multiply(float (&sums)[kRowTiles * kTiles][4], const uint16_t* const (&x)[kTiles],
                           int32_t tiles, int32_t step, int32_t count) const {
    ActivationFragment fragments[kSteps][kTiles];
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      if (i > 0 && i >= tiles) break;
      const uint16_t* row = x[i] + step * kStepDepth;
#pragma unroll
      for (int32_t s = 0; s < kSteps; ++s) {
        if (s < count) {
          fragments[s][i] = *reinterpret_cast<const ActivationFragment*>(row + s * kStepDepth);
        }
      }
    }
    WaitForCopies<kDepth - 1>();
    if (count >= kSteps) {
      MultiplySteps<kTiles>(sums, fragments, tiles, std::make_integer_sequence<int32_t, kSteps>());
      return;
    }
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
      if (s >= count) break;
      MultiplyOne<kTiles>(sums, fragments[s], tiles, slot_ + s * kStepBytes);
    }
  }

 private:
  template <int32_t... kS>
  static __device__ void PushSteps(uint32_t to, const uint16_t* row,
                                   std::integer_sequence<int32_t, kS...>) {
    (CopyAsyncStreaming<kS * kStepBytes, kS * kStepDepth * 2>(to, row), ...);
  }
  template <int32_t kTiles, int32_t... kS>
  __device__ void MultiplySteps(float (&sums)[kRowTiles * kTiles][4],
                                const ActivationFragment (&fragments)[kSteps][kTiles],
                                int32_t tiles, std::integer_sequence<int32_t, kS...>) const {
    (MultiplyOne<kTiles>(sums, fragments[kS], tiles, slot_ + kS * kStepBytes), ...);
  }
  template <int32_t kTiles>
  static __device__ void MultiplyOne(float (&sums)[kRowTiles * kTiles][4],
                                     const ActivationFragment (&x)[kTiles], int32_t tiles,
                                     uint32_t from) {
#pragma unroll
    for (int32_t r = 0; r < kRowTiles; ++r) {
      const WeightFragment weights = {LoadShared(from + 2 * r * kPieceBytes),
                                      LoadShared(from + (2 * r + 1) * kPieceBytes)};
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        if (i == 0 || i < tiles) MultiplyStep(sums[r * kTiles + i], weights, x[i]);
      }
    }
  }

  const uint32_t begin_;  // this lane's first piece
  uint32_t slot_;         // where the next chunk goes; with the ring full, the oldest one
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WEIGHT_RING_CUH_

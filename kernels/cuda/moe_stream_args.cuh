// What the parts of the kernel of moe_stream.h share.

#ifndef KERNELS_CUDA_MOE_STREAM_ARGS_CUH_
#define KERNELS_CUDA_MOE_STREAM_ARGS_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matrix_stack.h"
#include "kernels/cuda/moe_stream.h"
#include "kernels/cuda/weight_ring.cuh"
#include "kernels/moe.h"

namespace kernels::cuda {

// Four steps a chunk: a gate row and an up row of 8 columns, or 16 rows of down.
using StreamRing = WeightRing</*kRowTiles=*/1, /*kSteps=*/4, /*kDepth=*/6>;
inline constexpr int32_t kChunkSteps = 4;
inline constexpr int32_t kChunks = 6;
inline constexpr int32_t kGateUpColumns = kStreamRows / 2;  // of an expert, of a tile

struct MoeStreamWorkspace {
  uint16_t* normed;            // [rows, hidden] bf16
  float* logits;               // [rows, experts]
  uint16_t* activated;         // [rows * top_k, intermediate] bf16, by pair (row * top_k + i)
  uint16_t* shared_activated;  // per shared expert [rows, its intermediate]
};

struct MoeStreamArgs {
  MoeParams params;
  MatrixStack gate;
  StreamExperts experts;
  MoeStreamWorkspace work = {};
  uint32_t* routed = nullptr;   // counts tasks of the gate, zero between launches
  uint32_t* barrier = nullptr;  // of the grid

  __host__ __device__ int32_t num_pairs() const { return params.num_rows * params.gate.top_k; }
  // Of experts that have rows.
  __host__ __device__ int32_t max_active() const {
    return num_pairs() < params.gate.num_experts ? num_pairs() : params.gate.num_experts;
  }
};

// Rows of an expert, by the pair they come from, or every row.
struct ExpertRows {
  const int32_t* pairs;  // null: every row
  int32_t count;
};

// An expert that has rows, for gate_up: the shared ones, then the chosen ones.
struct GateUpExpert {
  const uint16_t* gate;
  const uint16_t* up;
  uint16_t* activated;  // [pairs or rows, intermediate]
  int32_t intermediate;
  ExpertRows rows;
};

// What a warp takes at a time in down: a piece of a shared expert's inner dimension, of about a
// routed expert's size, or a chosen expert.
struct DownUnit {
  const uint16_t* down;
  const uint16_t* activated;  // [pairs or rows, intermediate]
  int32_t intermediate;
  StepRange steps;
  ExpertRows rows;
  int32_t product;  // place of its first row's product
};

// A block's shared memory besides the ring.
struct StreamTables {
  WarpSums<1>* sums;      // [2]
  float* x;               // [hidden] a normed row: before there are sums
  float* products;        // [products, 16]: of one row and one unit
  GateUpExpert* experts;  // [num_shared + max_active]
  DownUnit* units;        // [pieces + max_active]
  float* logits;          // [rows, experts]
  std::byte* choosing;    // RowShared of every row
  int32_t* ids;           // [pairs]
  float* weights;         // [pairs]
  int32_t* pairs;         // [pairs] by expert, then row
  int32_t* place;         // [pairs] of each among these
  int32_t* begin;         // [max_active + 1] of each chosen expert among these
  int32_t* num_active;    // [1]
};

// Pieces of all shared experts, and of one.
__host__ __device__ inline int32_t NumPieces(const StreamExperts& experts, int32_t s) {
  return CeilDiv(static_cast<int32_t>(experts.shared_intermediate[s]),
                 static_cast<int32_t>(experts.intermediate_size));
}
__host__ __device__ inline int32_t NumPieces(const StreamExperts& experts) {
  int32_t pieces = 0;
  for (int32_t s = 0; s < experts.num_shared; ++s) pieces += NumPieces(experts, s);
  return pieces;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_STREAM_ARGS_CUH_

// The order in which the kernel of moe_stream.h takes weights, and what sends for them ahead.

#ifndef KERNELS_CUDA_MOE_SENDER_CUH_
#define KERNELS_CUDA_MOE_SENDER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/moe_stream_args.cuh"

namespace kernels::cuda {

// A position in a block's part of gate_up: every gridDim.x-th tile of the experts' columns.
class GateUpCursor {
 public:
  __device__ explicit GateUpCursor(const GateUpExpert* experts)
      : experts_(experts), tile_(static_cast<int32_t>(blockIdx.x)) {}

  // Where the position is among the first `num_experts`; false: past them.
  __device__ bool Find(int32_t num_experts) {
    while (expert_ < num_experts && tile_ >= NumTiles()) {
      tile_ -= NumTiles();
      ++expert_;
    }
    return expert_ < num_experts;
  }
  __device__ void Next() { tile_ += static_cast<int32_t>(gridDim.x); }

  __device__ const GateUpExpert& expert() const { return experts_[expert_]; }
  __device__ int32_t column() const { return tile_ * kGateUpColumns; }

 private:
  __device__ int32_t NumTiles() const { return experts_[expert_].intermediate / kGateUpColumns; }

  const GateUpExpert* const experts_;
  int32_t expert_ = 0;
  int32_t tile_;  // from the expert's first
};

// A position in a warp's part of down: of the block's tiles, which are every gridDim.x-th 16
// columns of the output, every kStreamWarps-th unit.
class DownCursor {
 public:
  __device__ DownCursor() : tile_(static_cast<int32_t>(blockIdx.x)) {}

  // False: there is no such tile.  Moves on to the next tile past the last unit.
  __device__ bool Find(int32_t num_units, int32_t num_tiles) {
    while (unit_ >= num_units && tile_ < num_tiles) NextTile();
    return tile_ < num_tiles;
  }
  __device__ void NextUnit() { unit_ += kStreamWarps; }
  __device__ void NextTile() {
    tile_ += static_cast<int32_t>(gridDim.x);
    unit_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  }

  __device__ int32_t tile() const { return tile_; }
  __device__ int32_t unit() const { return unit_; }

 private:
  int32_t tile_;
  int32_t unit_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
};

// Sends for a warp's weights chunk by chunk, in the order in which they are multiplied: those of
// gate_up, then those of down.
class StreamSender {
 public:
  // Only the shared experts are known yet.
  __device__ StreamSender(const MoeStreamArgs& args, const StreamTables& tables, StepRange steps)
      : args_(args),
        tables_(tables),
        steps_(steps),
        gate_up_(tables.experts),
        num_experts_(args.experts.num_shared) {}

  // The chosen experts are in the tables.
  __device__ void Choose(int32_t num_active) {
    num_experts_ += num_active;
    num_units_ = NumPieces(args_.experts) + num_active;
  }

  // False: nothing is left, or known.
  __device__ bool Send(StreamRing& ring) {
    if (step_ >= end_ && !Enter()) return false;
    ring.Push(rows_, step_, end_ - step_);
    step_ += kChunkSteps;
    return true;
  }

 private:
  // The next tile or unit.
  __device__ bool Enter() {
    const int32_t g = static_cast<int32_t>(threadIdx.x) % kWarpSize / 4;
    const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
    const auto hidden = static_cast<int32_t>(args_.experts.hidden_size);
    if (steps_.begin < steps_.end && gate_up_.Find(num_experts_)) {
      const GateUpExpert& expert = gate_up_.expert();
      const int64_t from = int64_t{gate_up_.column() + g} * hidden + 8 * t;
      Set(expert.gate + from, expert.up + from, steps_);
      gate_up_.Next();
      return true;
    }
    if (num_units_ == 0 || !down_.Find(num_units_, hidden / kStreamRows)) return false;
    const DownUnit& unit = tables_.units[down_.unit()];
    const int64_t column = down_.tile() * kStreamRows + g;
    const uint16_t* row = unit.down + column * unit.intermediate + 8 * t;
    Set(row, row + kStreamRows / 2 * unit.intermediate, unit.steps);
    down_.NextUnit();
    return true;
  }
  __device__ void Set(const uint16_t* top, const uint16_t* bottom, StepRange steps) {
    rows_[0] = top;
    rows_[1] = bottom;
    step_ = steps.begin;
    end_ = steps.end;
  }

  const MoeStreamArgs& args_;
  const StreamTables& tables_;
  const StepRange steps_;  // of gate_up
  GateUpCursor gate_up_;
  DownCursor down_;
  int32_t num_experts_;
  int32_t num_units_ = 0;  // 0: not known
  const uint16_t* rows_[2];
  int32_t step_ = 0;
  int32_t end_ = 0;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_SENDER_CUH_

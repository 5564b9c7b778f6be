#include "kernels/cuda/moe.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/gate.h"
#include "kernels/cuda/grouped_moe.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe_stream.h"
#include "kernels/cuda/tile_product.cuh"
#include "kernels/scratch_carver.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kCombineThreads = 256;

struct ExpertMatrices {
  StoredMatrix gate;  // [intermediate, hidden]
  StoredMatrix up;
  StoredMatrix down;  // [hidden, intermediate]
};

class CudaPackedExperts final : public PackedExperts {
 public:
  std::unique_ptr<DeviceBuffer> memory;
  std::unique_ptr<DeviceBuffer> views;  // ExpertMatrices of routed, then shared experts
  int64_t num_routed = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;               // of a routed expert
  std::vector<int64_t> shared_intermediate;    // of each shared expert
  std::unique_ptr<DeviceBuffer> stream_views;  // StreamExpert of routed experts, if they stream
  StreamExperts stream;
  GroupedExperts grouped;

  const ExpertMatrices* routed() const {
    return reinterpret_cast<const ExpertMatrices*>(views->data());
  }
  const ExpertMatrices* shared() const { return routed() + num_routed; }
};

struct Workspace {
  float* normed;  // [rows, hidden]
  float* logits;  // [rows, experts]
  ExpertChoice choice;
  float* activated;         // [slots, intermediate]
  float* slot_out;          // [slots, hidden]
  float* shared_activated;  // [rows, shared intermediate], one shared expert after the other
  float* shared_out;        // [rows, hidden]
};

// Sets the pointers of `work` within `base` (null: only measures) and returns the size.
int64_t LayOut(std::byte* base, int64_t rows, const GateConfig& gate, int64_t hidden,
               int64_t intermediate, int64_t shared_intermediate, Workspace& work) {
  ScratchCarver carver(base);
  const int64_t slots = rows * gate.top_k;
  carver.Take(work.normed, rows * hidden);
  carver.Take(work.logits, rows * gate.num_experts);
  carver.Take(work.choice.ids, slots);
  carver.Take(work.choice.weights, slots);
  carver.Take(work.choice.count, gate.num_experts);
  carver.Take(work.choice.slot_row, slots);
  carver.Take(work.choice.slot_of_pair, slots);
  carver.Take(work.activated, slots * intermediate);
  carver.Take(work.slot_out, slots * hidden);
  carver.Take(work.shared_activated, rows * shared_intermediate);
  carver.Take(work.shared_out, rows * hidden);
  return carver.size();
}

// Slots [begin, begin + count) of one expert.
struct SlotTile {
  int32_t expert = -1;  // -1: there is no such tile
  int32_t begin = 0;
  int32_t count = 0;
};

// A choice without counts: the one expert has every row, in order.
ExpertChoice EveryRow(int32_t num_rows) {
  return {.num_rows = num_rows, .num_experts = 1, .top_k = 1};
}
__device__ int64_t RowOfSlot(const ExpertChoice& choice, int32_t slot) {
  return choice.slot_row == nullptr ? slot : choice.slot_row[slot];
}

// The experts' slot tiles one after the other.  Every thread gets the same answer.
__device__ SlotTile FindSlotTile(const ExpertChoice& choice, int32_t index) {
  int32_t slots = 0;
  for (int32_t expert = 0; expert < choice.num_experts; ++expert) {
    const int32_t count = choice.count == nullptr ? choice.num_rows : choice.count[expert];
    const int32_t num_tiles = CeilDiv(count, kTileRows);
    if (index < num_tiles) {
      const int32_t begin = index * kTileRows;
      return {expert, slots + begin, min(kTileRows, count - begin)};
    }
    index -= num_tiles;
    slots += count;
  }
  return {};
}

// Slot tiles of all experts: each may end with one that is not full.
int64_t MaxSlotTiles(const ExpertChoice& choice) {
  return CeilDiv(choice.num_slots(), kTileRows) + choice.num_experts;
}

struct ExpertArgs {
  const ExpertMatrices* experts = nullptr;
  ExpertChoice choice;
  const float* input = nullptr;
  float* output = nullptr;
  bool accumulate = false;  // DownKernel: the output is added to
  float swiglu_limit = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
};

// activated[slot] = silu(W_gate a) * (W_up a), a = normed[row of slot].  Grid: columns, slot tiles.
__global__ void __launch_bounds__(kTileThreads) ActivateKernel(ExpertArgs args) {
  __shared__ TileShared shared;
  const SlotTile tile = FindSlotTile(args.choice, static_cast<int32_t>(blockIdx.y));
  if (tile.expert < 0) return;
  const ExpertMatrices& expert = args.experts[tile.expert];
  const int64_t column_begin = int64_t{blockIdx.x} * kTileColumns;
  const auto load_a = [&](int32_t r, int64_t k) {
    return r < tile.count ? args.input[RowOfSlot(args.choice, tile.begin + r) * args.hidden + k]
                          : 0.0f;
  };
  const auto load_from = [&](const StoredMatrix& matrix) {
    return [&](int32_t c, int64_t k) {
      return column_begin + c < args.intermediate ? LoadWeight(matrix, column_begin + c, k) : 0.0f;
    };
  };
  const TileSums gate = MultiplyTile(shared, args.hidden, load_a, load_from(expert.gate));
  const TileSums up = MultiplyTile(shared, args.hidden, load_a, load_from(expert.up));
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t j = 0; j < 4; ++j) {
      const int32_t row = TileRow(i);
      const int64_t column = column_begin + TileColumn(j);
      if (row < tile.count && column < args.intermediate) {
        args.output[(tile.begin + row) * args.intermediate + column] =
            SwiGlu(gate.value[i][j], up.value[i][j], args.swiglu_limit);
      }
    }
  }
}

// output[slot] = (or +=) W_down activated[slot].  Grid: columns, slot tiles.
__global__ void __launch_bounds__(kTileThreads) DownKernel(ExpertArgs args) {
  __shared__ TileShared shared;
  const SlotTile tile = FindSlotTile(args.choice, static_cast<int32_t>(blockIdx.y));
  if (tile.expert < 0) return;
  const StoredMatrix& down = args.experts[tile.expert].down;
  const int64_t column_begin = int64_t{blockIdx.x} * kTileColumns;
  const auto load_a = [&](int32_t r, int64_t k) {
    return r < tile.count ? args.input[(tile.begin + r) * args.intermediate + k] : 0.0f;
  };
  const auto load_w = [&](int32_t c, int64_t k) {
    return column_begin + c < args.hidden ? LoadWeight(down, column_begin + c, k) : 0.0f;
  };
  const TileSums sums = MultiplyTile(shared, args.intermediate, load_a, load_w);
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t j = 0; j < 4; ++j) {
      const int32_t row = TileRow(i);
      const int64_t column = column_begin + TileColumn(j);
      if (row < tile.count && column < args.hidden) {
        float& out = args.output[(tile.begin + row) * args.hidden + column];
        out = args.accumulate ? out + sums.value[i][j] : sums.value[i][j];
      }
    }
  }
}

struct CombineArgs {
  ExpertChoice choice;
  const float* input;  // null: no residual
  int64_t input_row_stride;
  const float* slot_out;    // [slots, hidden]
  const float* shared_out;  // [rows, hidden]; null: no shared expert
  float* output;
  int64_t output_row_stride;
  int64_t hidden;
};

// output = (input +) sum_i weight_i * slot_out, in ascending expert, the shared experts last.
// Grid: columns, rows.
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(CombineArgs args) {
  const int64_t column = int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (column >= args.hidden) return;
  float sum = 0;
  for (int32_t i = 0; i < args.choice.top_k; ++i) {
    const int64_t pair = row * args.choice.top_k + i;
    const float out = args.slot_out[args.choice.slot_of_pair[pair] * args.hidden + column];
    sum += args.choice.weights[pair] * out;
  }
  if (args.shared_out != nullptr) sum += args.shared_out[row * args.hidden + column];
  if (args.input != nullptr) sum = args.input[row * args.input_row_stride + column] + sum;
  args.output[row * args.output_row_stride + column] = sum;
}

absl::Status CheckExpert(const ExpertTensors& tensors) {
  for (const WeightTensor* tensor : {&tensors.gate, &tensors.up, &tensors.down}) {
    RETURN_IF_ERROR(CheckStored(*tensor));
  }
  const int64_t intermediate = tensors.gate.rows, hidden = tensors.gate.cols;
  if (tensors.up.rows != intermediate || tensors.up.cols != hidden || tensors.down.rows != hidden ||
      tensors.down.cols != intermediate) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert shapes do not fit: gate [", intermediate, ", ", hidden, "], up [", tensors.up.rows,
        ", ", tensors.up.cols, "], down [", tensors.down.rows, ", ", tensors.down.cols, "]"));
  }
  return absl::OkStatus();
}

// out [slots, hidden] = (or +=) the experts of `args` on the slots' rows of `normed`.
absl::Status RunExperts(const Launcher& launcher, ExpertArgs args, const float* normed,
                        float* activated, float* out) {
  const auto tiles = static_cast<uint32_t>(MaxSlotTiles(args.choice));
  const auto columns = [](int64_t count) {
    return static_cast<uint32_t>(CeilDiv(count, int64_t{kTileColumns}));
  };
  args.input = normed;
  args.output = activated;
  RETURN_IF_ERROR(Launch(launcher, "moe activate", ActivateKernel,
                         {.grid = dim3(columns(args.intermediate), tiles), .threads = kTileThreads},
                         args));
  args.input = activated;
  args.output = out;
  return Launch(launcher, "moe down", DownKernel,
                {.grid = dim3(columns(args.hidden), tiles), .threads = kTileThreads}, args);
}

// The experts in the form that streams, if there is one for them.
absl::Status MakeStreamExperts(absl::Span<const StoredMatrix> matrices,
                               CudaPackedExperts& experts) {
  const std::optional<ExpertFormats> formats = ExpertFormatsOf(matrices, experts.num_routed);
  if (!formats.has_value()) return absl::OkStatus();
  if (experts.shared_intermediate.size() > kMaxSharedExperts) return absl::OkStatus();
  std::vector<StreamExpert> views;
  for (size_t i = 0; i < matrices.size(); i += 3) {
    views.push_back(
        {AsStreamed(matrices[i]), AsStreamed(matrices[i + 1]), AsStreamed(matrices[i + 2])});
  }
  StreamExperts& stream = experts.stream;
  stream.formats = *formats;
  stream.hidden_size = experts.hidden_size;
  stream.intermediate_size = experts.intermediate_size;
  for (const int64_t size : experts.shared_intermediate) {
    stream.shared[stream.num_shared] = views[experts.num_routed + stream.num_shared];
    stream.shared_intermediate[stream.num_shared++] = size;
  }
  const int64_t size_bytes = experts.num_routed * static_cast<int64_t>(sizeof(StreamExpert));
  ASSIGN_OR_RETURN(experts.stream_views, DeviceBuffer::Allocate(size_bytes));
  RETURN_IF_ERROR(ToStatus(cudaMemcpy(experts.stream_views->data(), views.data(),
                                      static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice),
                           "copying views of experts"));
  stream.routed = reinterpret_cast<const StreamExpert*>(experts.stream_views->data());
  return absl::OkStatus();
}

absl::Status RunSharedExperts(const Launcher& launcher, const CudaPackedExperts& experts,
                              const MoeParams& params, const Workspace& work) {
  for (size_t i = 0; i < experts.shared_intermediate.size(); ++i) {
    const ExpertArgs args{.experts = experts.shared() + i,
                          .choice = EveryRow(params.num_rows),
                          .accumulate = i > 0,
                          .swiglu_limit = params.swiglu_limit,
                          .hidden = experts.hidden_size,
                          .intermediate = experts.shared_intermediate[i]};
    RETURN_IF_ERROR(
        RunExperts(launcher, args, work.normed, work.shared_activated, work.shared_out));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(absl::Span<const ExpertTensors> routed,
                                                           absl::Span<const ExpertTensors> shared) {
  if (routed.empty()) return absl::InvalidArgumentError("no routed expert to pack");
  auto experts = std::make_unique<CudaPackedExperts>();
  experts->num_routed = static_cast<int64_t>(routed.size());
  experts->hidden_size = routed[0].gate.cols;
  experts->intermediate_size = routed[0].gate.rows;
  MatrixUploader uploader;
  for (size_t i = 0; i < routed.size() + shared.size(); ++i) {
    const bool is_routed = i < routed.size();
    const ExpertTensors& tensors = is_routed ? routed[i] : shared[i - routed.size()];
    if (tensors.gate.cols != experts->hidden_size ||
        (is_routed && tensors.gate.rows != experts->intermediate_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          is_routed ? "routed" : "shared", " expert ", is_routed ? i : i - routed.size(), " is [",
          tensors.gate.rows, ", ", tensors.gate.cols, "], routed expert 0 is [",
          experts->intermediate_size, ", ", experts->hidden_size, "]"));
    }
    RETURN_IF_ERROR(CheckExpert(tensors));
    if (!is_routed) experts->shared_intermediate.push_back(tensors.gate.rows);
    for (const WeightTensor* tensor : {&tensors.gate, &tensors.up, &tensors.down}) {
      uploader.Add(*tensor);
    }
  }
  ASSIGN_OR_RETURN(MatrixUploader::Result uploaded, uploader.Upload());
  experts->memory = std::move(uploaded.memory);
  const auto views_bytes = static_cast<int64_t>(uploaded.matrices.size() * sizeof(StoredMatrix));
  ASSIGN_OR_RETURN(experts->views, DeviceBuffer::Allocate(views_bytes));
  static_assert(sizeof(ExpertMatrices) == 3 * sizeof(StoredMatrix));
  RETURN_IF_ERROR(ToStatus(cudaMemcpy(experts->views->data(), uploaded.matrices.data(),
                                      static_cast<size_t>(views_bytes), cudaMemcpyHostToDevice),
                           "copying views of experts"));
  RETURN_IF_ERROR(MakeStreamExperts(uploaded.matrices, *experts));
  ASSIGN_OR_RETURN(experts->grouped, MapExperts(uploaded.matrices, experts->num_routed));
  RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(nullptr), "copying views of experts"));
  return experts;
}

int64_t MoeWorkspaceBytes(int32_t max_rows, const GateConfig& gate, int64_t hidden_size,
                          int64_t moe_intermediate_size, int64_t shared_intermediate_size) {
  Workspace work;
  return std::max({LayOut(nullptr, max_rows, gate, hidden_size, moe_intermediate_size,
                          shared_intermediate_size, work),
                   StreamMoeWorkspaceBytes(max_rows, gate, hidden_size, moe_intermediate_size,
                                           shared_intermediate_size),
                   GroupedMoeWorkspaceBytes(max_rows, gate, hidden_size, moe_intermediate_size,
                                            shared_intermediate_size)});
}

absl::Status Moe(const Launcher& launcher, const MoeParams& params) {
  FERRY_CHECK(params.experts != nullptr && params.gate_weight != nullptr);
  const auto& experts = static_cast<const CudaPackedExperts&>(*params.experts);
  RETURN_IF_ERROR(CheckMoe(params, experts.num_routed, experts.hidden_size));
  if (params.workspace == nullptr) return absl::InvalidArgumentError("moe: no workspace");
  if (params.num_rows == 0) return absl::OkStatus();
  const MatrixStack& gate_weight =
      static_cast<const CudaPackedLinear&>(*params.gate_weight).stack();
  if (launcher.device.bfloat16 && CanStreamMoe(params, experts.stream, gate_weight)) {
    return StreamMoe(launcher, params, experts.stream, gate_weight);
  }
  if (launcher.device.bfloat16 && CanGroupMoe(params, experts.grouped, gate_weight)) {
    return GroupedMoe(launcher, params, experts.grouped, gate_weight);
  }
  int64_t shared_intermediate = 0;
  for (const int64_t size : experts.shared_intermediate) shared_intermediate += size;
  Workspace work;
  LayOut(params.workspace, params.num_rows, params.gate, experts.hidden_size,
         experts.intermediate_size, shared_intermediate, work);
  work.choice.num_rows = params.num_rows;
  work.choice.num_experts = params.gate.num_experts;
  work.choice.top_k = params.gate.top_k;

  LinearParams norm;
  norm.num_rows = params.num_rows;
  norm.input = {.data = const_cast<float*>(params.input), .row_stride = params.input_row_stride};
  norm.norm_weight = params.norm_weight;
  norm.norm_eps = params.norm_eps;
  RETURN_IF_ERROR(PrepareRows(launcher, norm, experts.hidden_size, work.normed));
  // Logits are never of rounded rows: they decide which experts there are.
  Device exact = launcher.device;
  exact.bfloat16 = false;
  const OutputSegment logits{work.logits, params.gate.num_experts, params.gate.num_experts};
  RETURN_IF_ERROR(Linear({exact, launcher.stream},
                         {.weight = params.gate_weight,
                          .num_rows = params.num_rows,
                          .input = {.data = work.normed, .row_stride = experts.hidden_size},
                          .outputs = absl::MakeConstSpan(&logits, 1)}));
  RETURN_IF_ERROR(SelectExperts(launcher, params, work.logits, work.choice));
  RETURN_IF_ERROR(SortByExpert(launcher, work.choice));
  const ExpertArgs routed{.experts = experts.routed(),
                          .choice = work.choice,
                          .swiglu_limit = params.swiglu_limit,
                          .hidden = experts.hidden_size,
                          .intermediate = experts.intermediate_size};
  RETURN_IF_ERROR(RunExperts(launcher, routed, work.normed, work.activated, work.slot_out));
  RETURN_IF_ERROR(RunSharedExperts(launcher, experts, params, work));
  const CombineArgs combine{
      .choice = work.choice,
      .input = params.residual ? params.input : nullptr,
      .input_row_stride = params.input_row_stride,
      .slot_out = work.slot_out,
      .shared_out = experts.shared_intermediate.empty() ? nullptr : work.shared_out,
      .output = params.output,
      .output_row_stride = params.output_row_stride,
      .hidden = experts.hidden_size};
  const dim3 grid(static_cast<uint32_t>(CeilDiv(experts.hidden_size, int64_t{kCombineThreads})),
                  static_cast<uint32_t>(params.num_rows));
  return Launch(launcher, "moe combine", CombineKernel, {.grid = grid, .threads = kCombineThreads},
                combine);
}

}  // namespace kernels::cuda

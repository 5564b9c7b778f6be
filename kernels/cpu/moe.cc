#include "kernels/cpu/moe.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/gate.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/row_blocks.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

struct Expert {
  PackedMatrix gate;  // [intermediate, hidden]
  PackedMatrix up;
  PackedMatrix down;  // [hidden, intermediate]

  int64_t intermediate() const { return gate.n(); }
};

class CpuPackedExperts final : public PackedExperts {
 public:
  std::vector<Expert> routed;
  std::vector<Expert> shared;
  int64_t hidden() const { return routed[0].gate.k(); }
};

absl::StatusOr<Expert> PackExpert(ThreadPool& pool, const ExpertTensors& tensors,
                                  const MatrixKernels& kernels) {
  const int64_t intermediate = tensors.gate.rows, hidden = tensors.gate.cols;
  if (tensors.up.rows != intermediate || tensors.up.cols != hidden || tensors.down.rows != hidden ||
      tensors.down.cols != intermediate) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert shapes do not fit: gate [", intermediate, ", ", hidden, "], up [", tensors.up.rows,
        ", ", tensors.up.cols, "], down [", tensors.down.rows, ", ", tensors.down.cols, "]"));
  }
  const auto pack = [&](const WeightTensor& tensor) -> absl::StatusOr<PackedMatrix> {
    RETURN_IF_ERROR(CheckWeightTensor(tensor));
    return PackedMatrix::Pack(pool, {.tensor = tensor, .row_count = tensor.rows}, kernels);
  };
  Expert expert;
  ASSIGN_OR_RETURN(expert.gate, pack(tensors.gate));
  ASSIGN_OR_RETURN(expert.up, pack(tensors.up));
  ASSIGN_OR_RETURN(expert.down, pack(tensors.down));
  return expert;
}

// Scratch of one block of rows.  A slot is one (expert, row) pair; slots are sorted by expert, then
// row.
struct BlockScratch {
  float* normed = nullptr;            // [num_rows, hidden]
  float* logits = nullptr;            // [num_rows, num_experts]
  int32_t* ids = nullptr;             // [num_rows, top_k]
  float* weights = nullptr;           // [num_rows, top_k]
  int32_t* slot_begin = nullptr;      // [num_experts + 1]
  int32_t* next_slot = nullptr;       // [num_experts]
  int32_t* active = nullptr;          // [num_experts], ids of experts that have slots
  int32_t* slot_row = nullptr;        // [num_rows * top_k]
  float* slot_weight = nullptr;       // [num_rows * top_k]
  float* activated = nullptr;         // [num_rows * top_k, intermediate], by slot
  float* shared_activated = nullptr;  // per shared expert [num_rows, its intermediate]
};

BlockScratch TakeScratch(ThreadPool& pool, int64_t num_rows, const GateConfig& gate,
                         const CpuPackedExperts& experts) {
  int64_t shared_intermediate = 0;
  for (const Expert& expert : experts.shared) shared_intermediate += expert.intermediate();
  BlockScratch scratch;
  // Two passes over the same list: sizes first, then addresses.
  std::byte* base = nullptr;
  for (int pass = 0; pass < 2; ++pass) {
    int64_t offset = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
      using Element = std::remove_reference_t<decltype(*pointer)>;
      if (base != nullptr) pointer = reinterpret_cast<Element*>(base + offset);
      offset += (count * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
    };
    take(scratch.normed, num_rows * experts.hidden());
    take(scratch.logits, num_rows * gate.num_experts);
    take(scratch.ids, num_rows * gate.top_k);
    take(scratch.weights, num_rows * gate.top_k);
    take(scratch.slot_begin, gate.num_experts + 1);
    take(scratch.next_slot, gate.num_experts);
    take(scratch.active, gate.num_experts);
    take(scratch.slot_row, num_rows * gate.top_k);
    take(scratch.slot_weight, num_rows * gate.top_k);
    take(scratch.activated, num_rows * gate.top_k * experts.routed[0].intermediate());
    take(scratch.shared_activated, num_rows * shared_intermediate);
    if (pass == 0) base = pool.Scratch(offset);
  }
  return scratch;
}

// Sorts the chosen (row, expert) pairs into slots; returns the number of active experts.
int32_t SortSlots(const GateConfig& gate, int32_t num_rows, const BlockScratch& scratch) {
  const int32_t num_pairs = num_rows * gate.top_k;
  std::fill_n(scratch.slot_begin, gate.num_experts + 1, 0);
  for (int32_t i = 0; i < num_pairs; ++i) ++scratch.slot_begin[scratch.ids[i] + 1];
  int32_t num_active = 0;
  for (int32_t e = 0; e < gate.num_experts; ++e) {
    if (scratch.slot_begin[e + 1] > 0) scratch.active[num_active++] = e;
    scratch.slot_begin[e + 1] += scratch.slot_begin[e];
    scratch.next_slot[e] = scratch.slot_begin[e];
  }
  for (int32_t i = 0; i < num_pairs; ++i) {
    const int32_t slot = scratch.next_slot[scratch.ids[i]]++;
    scratch.slot_row[slot] = i / gate.top_k;
    scratch.slot_weight[slot] = scratch.weights[i];
  }
  return num_active;
}

// activated[i][panel's columns] = silu(gate rows[i]) * (up rows[i]), clamped (moe.h).
void ActivatePanel(const Expert& expert, int64_t panel, const float* const* rows, int32_t num_rows,
                   float swiglu_limit, float* activated /* [num_rows, intermediate] */) {
  alignas(64) float gate[kRowBlock * kPanelColumns];
  alignas(64) float up[kRowBlock * kPanelColumns];
  expert.gate.MultiplyPanel(panel, rows, num_rows, gate);
  expert.up.MultiplyPanel(panel, rows, num_rows, up);
  expert.gate.kernels().swiglu(gate, up, int64_t{num_rows} * kPanelColumns, swiglu_limit, gate);
  for (int32_t i = 0; i < num_rows; ++i) {
    std::copy_n(gate + i * kPanelColumns, expert.gate.panel_columns(panel),
                activated + i * expert.intermediate() + panel * kPanelColumns);
  }
}

// sums[row of i][0:32] += weight of i * (down activated[i])[panel's columns]; row_of null: it is i,
// weights null: weight 1.
void AddDownPanel(const Expert& expert, int64_t panel, const float* activated, int32_t num_rows,
                  const int32_t* row_of, const float* weights, float* sums) {
  const float* rows[kRowBlock] = {};
  for (int32_t i = 0; i < num_rows; ++i) rows[i] = activated + i * expert.intermediate();
  alignas(64) float down[kRowBlock * kPanelColumns];
  expert.down.MultiplyPanel(panel, rows, num_rows, down);
  for (int32_t i = 0; i < num_rows; ++i) {
    float* sum = sums + (row_of != nullptr ? row_of[i] : i) * kPanelColumns;
    const float weight = weights != nullptr ? weights[i] : 1.0f;
    for (int32_t j = 0; j < kPanelColumns; ++j) sum[j] += weight * down[i * kPanelColumns + j];
  }
}

// All routed and shared experts' hidden activations of the block.
void ActivateExperts(ThreadPool& pool, const CpuPackedExperts& experts, int32_t num_rows,
                     int32_t num_active, float swiglu_limit, const BlockScratch& scratch) {
  const int64_t hidden = experts.hidden();
  const int64_t routed_panels = experts.routed[0].gate.num_panels();
  int64_t shared_panels = 0;
  for (const Expert& expert : experts.shared) shared_panels += expert.gate.num_panels();
  // Shared experts first: they have every row, so their tasks are the longest.
  pool.ParallelFor(shared_panels + num_active * routed_panels, [&](int64_t task) {
    const float* rows[kRowBlock] = {};
    if (task < shared_panels) {
      float* activated = scratch.shared_activated;
      for (const Expert& expert : experts.shared) {
        if (task < expert.gate.num_panels()) {
          for (int32_t r = 0; r < num_rows; ++r) rows[r] = scratch.normed + r * hidden;
          return ActivatePanel(expert, task, rows, num_rows, swiglu_limit, activated);
        }
        task -= expert.gate.num_panels();
        activated += num_rows * expert.intermediate();
      }
    }
    task -= shared_panels;
    const int32_t id = scratch.active[task / routed_panels];
    const Expert& expert = experts.routed[static_cast<size_t>(id)];
    const int32_t begin = scratch.slot_begin[id], count = scratch.slot_begin[id + 1] - begin;
    for (int32_t i = 0; i < count; ++i) {
      rows[i] = scratch.normed + scratch.slot_row[begin + i] * hidden;
    }
    ActivatePanel(expert, task % routed_panels, rows, count, swiglu_limit,
                  scratch.activated + begin * expert.intermediate());
  });
}

void CombineExperts(ThreadPool& pool, const MoeParams& params, const CpuPackedExperts& experts,
                    int64_t block, int32_t num_rows, int32_t num_active,
                    const BlockScratch& scratch) {
  const PackedMatrix& shape = experts.routed[0].down;
  pool.ParallelFor(shape.num_panels(), [&](int64_t panel) {
    alignas(64) float sums[kRowBlock * kPanelColumns];
    std::fill_n(sums, num_rows * kPanelColumns, 0.0f);
    for (int32_t i = 0; i < num_active; ++i) {
      const int32_t id = scratch.active[i];
      const Expert& expert = experts.routed[static_cast<size_t>(id)];
      const int32_t begin = scratch.slot_begin[id];
      AddDownPanel(expert, panel, scratch.activated + begin * expert.intermediate(),
                   scratch.slot_begin[id + 1] - begin, scratch.slot_row + begin,
                   scratch.slot_weight + begin, sums);
    }
    const float* activated = scratch.shared_activated;
    for (const Expert& expert : experts.shared) {
      AddDownPanel(expert, panel, activated, num_rows, nullptr, nullptr, sums);
      activated += num_rows * expert.intermediate();
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      const float* in = params.input + (block + r) * params.input_row_stride;
      float* out = params.output + (block + r) * params.output_row_stride;
      const float* sum = sums + r * kPanelColumns;
      for (int64_t j = 0, c = panel * kPanelColumns; j < shape.panel_columns(panel); ++j, ++c) {
        out[c] = params.residual ? in[c] + sum[j] : sum[j];
      }
    }
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedExperts>> PackExperts(ThreadPool& pool,
                                                           absl::Span<const ExpertTensors> routed,
                                                           absl::Span<const ExpertTensors> shared,
                                                           const MatrixKernels& kernels) {
  if (routed.empty()) return absl::InvalidArgumentError("no routed expert to pack");
  auto experts = std::make_unique<CpuPackedExperts>();
  for (size_t i = 0; i < routed.size() + shared.size(); ++i) {
    const bool is_routed = i < routed.size();
    const ExpertTensors& tensors = is_routed ? routed[i] : shared[i - routed.size()];
    if (tensors.gate.cols != routed[0].gate.cols ||
        (is_routed && tensors.gate.rows != routed[0].gate.rows)) {
      return absl::InvalidArgumentError(absl::StrCat(
          is_routed ? "routed" : "shared", " expert ", is_routed ? i : i - routed.size(), " is [",
          tensors.gate.rows, ", ", tensors.gate.cols, "], routed expert 0 is [",
          routed[0].gate.rows, ", ", routed[0].gate.cols, "]"));
    }
    ASSIGN_OR_RETURN(Expert expert, PackExpert(pool, tensors, kernels));
    (is_routed ? experts->routed : experts->shared).push_back(std::move(expert));
  }
  return experts;
}

absl::Status Moe(ThreadPool& pool, const MoeParams& params) {
  FERRY_CHECK(params.experts != nullptr && params.gate_weight != nullptr);
  const auto& experts = static_cast<const CpuPackedExperts&>(*params.experts);
  RETURN_IF_ERROR(CheckMoe(params, static_cast<int64_t>(experts.routed.size()), experts.hidden()));
  const GateConfig& gate = params.gate;
  const int64_t hidden = experts.hidden();
  for (int64_t block = 0; block < params.num_rows; block += kRowBlock) {
    const int32_t num_rows =
        static_cast<int32_t>(std::min<int64_t>(kRowBlock, params.num_rows - block));
    const BlockScratch scratch = TakeScratch(pool, num_rows, gate, experts);
    pool.ParallelFor(num_rows, [&](int64_t r) {
      RmsNormRow(params.input + (block + r) * params.input_row_stride, params.norm_weight,
                 params.norm_eps, hidden, scratch.normed + r * hidden);
    });
    // Takes no scratch: its input is float32 and ready.
    const OutputSegment logits = {scratch.logits, gate.num_experts, gate.num_experts};
    RETURN_IF_ERROR(Linear(pool, {.weight = params.gate_weight,
                                  .num_rows = num_rows,
                                  .input = {.data = scratch.normed, .row_stride = hidden},
                                  .outputs = absl::MakeConstSpan(&logits, 1)}));
    pool.ParallelFor(num_rows, [&](int64_t r) {
      const float* row_logits = scratch.logits + r * gate.num_experts;
      int32_t* ids = scratch.ids + r * gate.top_k;
      float* weights = scratch.weights + r * gate.top_k;
      if (params.expert_table == nullptr) {
        SelectExperts(gate, row_logits, params.gate_bias, ids, weights);
        return;
      }
      const int32_t id = params.token_ids[block + r];
      const int64_t token = id >= 0 && id < params.vocab_size ? id : 0;
      WeighExperts(gate, row_logits, params.expert_table + token * gate.top_k, ids, weights);
    });
    const int64_t num_pairs = int64_t{num_rows} * gate.top_k;
    if (params.topk_ids != nullptr) {
      std::copy_n(scratch.ids, num_pairs, params.topk_ids + block * gate.top_k);
    }
    if (params.topk_weights != nullptr) {
      std::copy_n(scratch.weights, num_pairs, params.topk_weights + block * gate.top_k);
    }
    const int32_t num_active = SortSlots(gate, num_rows, scratch);
    ActivateExperts(pool, experts, num_rows, num_active, params.swiglu_limit, scratch);
    CombineExperts(pool, params, experts, block, num_rows, num_active, scratch);
  }
  return absl::OkStatus();
}

}  // namespace kernels::cpu

#include "kernels/cpu/window_slots.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

bool IsPadded(const WindowSlotsParams& params, int32_t row) {
  return row < params.num_ring_rows && params.state_slots[params.row_to_seq[row]] < 0;
}

int32_t Length(const WindowSlotsParams& params, int32_t row) {
  return IsPadded(params, row) ? 0 : params.positions[row] + 1 - params.window_start[row];
}

absl::Status CheckLengths(const WindowSlotsParams& params) {
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const int32_t length = Length(params, row);
    if (!IsPadded(params, row) && (length < 1 || length > params.window)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "window slots: row ", row, " at position ", params.positions[row], " attends from ",
          params.window_start[row], " in a window of ", params.window));
    }
  }
  return absl::OkStatus();
}

void WriteRow(const WindowSlotsParams& params, int32_t row) {
  const int32_t seq = params.row_to_seq[row];
  const int32_t length = Length(params, row);
  const auto slot = [&](int32_t position) {
    return row < params.num_ring_rows
               ? int64_t{params.state_slots[seq]} * params.window + position % params.window
               : int64_t{params.buffer_begin[seq]} + position;
  };
  int32_t* indices = params.indices + int64_t{row} * params.width;
  params.own[row] = length == 0 ? -1 : slot(params.positions[row]);
  params.lengths[row] = length;
  for (int32_t j = 0; j < length; ++j) {
    indices[j] = static_cast<int32_t>(slot(params.window_start[row] + j));
  }
  std::fill(indices + length, indices + params.width, -1);
}

}  // namespace

absl::Status WindowSlots(ThreadPool& pool, const WindowSlotsParams& params) {
  RETURN_IF_ERROR(CheckWindowSlots(params));
  RETURN_IF_ERROR(CheckLengths(params));
  pool.ParallelFor(params.num_rows,
                   [&](int64_t row) { WriteRow(params, static_cast<int32_t>(row)); });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

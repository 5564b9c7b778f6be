#include "kernels/window_slots.h"

#include "absl/strings/str_cat.h"
#include "kernels/sparse_decode.h"

namespace kernels {

int32_t WindowWidth(int32_t window) {
  return (window + kSparseIndexMultiple - 1) / kSparseIndexMultiple * kSparseIndexMultiple;
}

absl::Status CheckWindowSlots(const WindowSlotsParams& params) {
  if (params.num_rows < 0 || params.num_ring_rows < 0 || params.num_ring_rows > params.num_rows ||
      params.window < 1 || params.width < params.window) {
    return absl::InvalidArgumentError(
        absl::StrCat("window slots of ", params.num_rows, " rows, ", params.num_ring_rows,
                     " of them in rings, a window of ", params.window, ", width ", params.width));
  }
  if (params.num_ring_rows < params.num_rows && params.buffer_begin == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("window slots: ", params.num_rows - params.num_ring_rows,
                     " rows lie in a buffer that is not given"));
  }
  return absl::OkStatus();
}

}  // namespace kernels

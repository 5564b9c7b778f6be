#include "kernels/cpu/rope.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/rms_norm.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kRowsPerTask = 16;

// `direction`: 1, or -1 for the angle negated; the product with it is exact.
void RotateBy(const RopeTable& rope, int32_t position, float direction, float* x) {
  const int32_t half = rope.rope_dim / 2;
  const bool interleaved = rope.layout == RopeLayout::kInterleaved;
  const int32_t stride = interleaved ? 2 : 1;              // from pair to pair
  const int32_t partner = interleaved ? 1 : half;          // from a pair's first to its second
  const float* cos = rope.cos + int64_t{position} * half;  // [half]
  const float* sin = rope.sin + int64_t{position} * half;
  for (int32_t i = 0; i < half; ++i) {
    const float a = x[i * stride];
    const float b = x[i * stride + partner];
    const float s = direction * sin[i];
    x[i * stride] = a * cos[i] - b * s;
    x[i * stride + partner] = b * cos[i] + a * s;
  }
}

}  // namespace

absl::Status CheckPosition(const RopeTable& rope, int32_t row, int32_t position) {
  if (position < 0 || position >= rope.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat("row ", row, ": position ", position,
                                                   " is outside the rope table of ",
                                                   rope.max_positions, " positions"));
  }
  return absl::OkStatus();
}

void Rotate(const RopeTable& rope, int32_t position, float* x) {
  RotateBy(rope, position, /*direction=*/1.0f, x);
}

void RotateBack(const RopeTable& rope, int32_t position, float* x) {
  RotateBy(rope, position, /*direction=*/-1.0f, x);
}

absl::Status Rope(ThreadPool& pool, const RopeParams& params) {
  if (absl::Status status = CheckRope(params); !status.ok()) return status;
  if (params.num_heads == 0 || params.rope.rope_dim == 0) return absl::OkStatus();
  for (int32_t row = 0; row < params.num_rows; ++row) {
    absl::Status status = CheckPosition(params.rope, row, params.positions[row]);
    if (!status.ok()) return status;
  }
  const int64_t num_tasks = (params.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    const int32_t begin = static_cast<int32_t>(task) * kRowsPerTask;
    const int32_t end = std::min(begin + kRowsPerTask, params.num_rows);
    for (int32_t row = begin; row < end; ++row) {
      float* x = params.data + row * params.row_stride;
      for (int32_t head = 0; head < params.num_heads; ++head) {
        float* rotary = x + head * params.head_stride;
        if (params.norm_dim > 0) {
          float* first = rotary + params.rope.rope_dim - params.norm_dim;
          const float inverse = InverseRms(first, params.norm_eps, params.norm_dim);
          for (int32_t i = 0; i < params.norm_dim; ++i) first[i] *= inverse;
        }
        Rotate(params.rope, params.positions[row], rotary);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

#include "kernels/cpu/embed.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/convert.h"

namespace kernels::cpu {

absl::Status Embed(ThreadPool& pool, const EmbedParams& params) {
  const WeightTensor& table = params.table;
  if (absl::Status status = CheckEmbed(params); !status.ok()) return status;
  const bool is_float = table.dtype == DType::kFloat32;
  const int64_t element_bytes = is_float ? 4 : 2;
  pool.ParallelFor(params.num_rows, [&](int64_t r) {
    const int32_t source = params.token_source != nullptr ? params.token_source[r] : -1;
    const int64_t id = source >= 0 ? params.previous_sampled[source] : params.token_ids[r];
    if (params.resolved_ids != nullptr) params.resolved_ids[r] = static_cast<int32_t>(id);
    float* out = params.output + r * params.output_row_stride;
    if (id < 0 || id >= table.rows) {
      std::fill_n(out, table.cols, 0.0f);
      return;
    }
    const std::byte* row =
        static_cast<const std::byte*>(table.data) + id * table.cols * element_bytes;
    if (is_float) {
      std::memcpy(out, row, static_cast<size_t>(table.cols) * sizeof(float));
      return;
    }
    for (int64_t i = 0; i < table.cols; ++i) {
      uint16_t bits;  // mapped files do not promise alignment
      std::memcpy(&bits, row + i * 2, sizeof(bits));
      out[i] = table.dtype == DType::kBfloat16 ? FloatFromBfloat16(bits) : FloatFromFloat16(bits);
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu

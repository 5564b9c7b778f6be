#include "kernels/cpu/embed.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"

namespace kernels::cpu {

absl::Status Embed(ThreadPool& pool, const EmbedParams& params) {
  const WeightTensor& table = params.table;
  const bool is_float = table.dtype == DType::kFloat32;
  if (!is_float && table.dtype != DType::kBfloat16 && table.dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(absl::StrCat("no cpu kernel for embeddings of dtype ",
                                                   std::string(DTypeName(table.dtype))));
  }
  if (table.scales != nullptr) {
    return absl::InvalidArgumentError("no cpu kernel for embeddings with scales");
  }
  if (params.num_rows > 1 && params.output_row_stride < table.cols) {
    return absl::InvalidArgumentError(absl::StrCat("output row stride ", params.output_row_stride,
                                                   " < ", table.cols, " columns"));
  }
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

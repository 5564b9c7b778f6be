// Linear: y = W x over packed weights, with the pointwise work around it.
//
//   prologue:  r = x + residual_in (if given);  residual_out = r (if given)
//              a = rmsnorm(r; norm_weight, norm_eps) (if norm_weight), else r
//   product:   y = W a, float32 accumulation, weights read once in their stored format
//   epilogue:  kNone       segment <- y
//              kResidual   segment <- y + epilogue_residual
//              kSwiGlu     W holds gate rows then up rows: segment <- silu(min(g, c)) * clamp(u, -c, c)
//
// A row's result does not depend, bit for bit, on the other rows of the call; on cuda, where products
// are of bf16, as long as there are up to 16, up to 128, or more of them: these are three forms.  Over
// fp8 weights there are two: as many rows as a block can hold, 16 at most, and more.

#ifndef KERNELS_LINEAR_H_
#define KERNELS_LINEAR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/tensor.h"

namespace kernels {

// Weights in the form a backend computes with, made at load from a list of tensors with equal `cols`,
// stacked by rows (q and kv_a; gate and up).  Opaque; keeps the stored format (bf16, fp8).
class PackedLinear {
 public:
  virtual ~PackedLinear() = default;
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }

 protected:
  PackedLinear(int64_t out_features, int64_t in_features)
      : out_features_(out_features), in_features_(in_features) {}

 private:
  int64_t out_features_;
  int64_t in_features_;
};

enum class LinearEpilogue : uint8_t { kNone, kResidual, kSwiGlu };

// Consecutive output columns and where they go: row r, column c is element r * row_stride + c.
struct OutputSegment {
  void* data = nullptr;
  int64_t row_stride = 0;                // elements
  int64_t columns = 0;
  DType dtype = DType::kFloat32;         // kBfloat16: rounded; not with kResidual, not on the CPU
};

struct LinearParams {
  const PackedLinear* weight = nullptr;
  int32_t num_rows = 0;
  Activation input;                      // [num_rows, in_features]
  const float* residual_in = nullptr;    // [num_rows, in_features], stride of input; may be null
  float* residual_out = nullptr;         // same; may be null; may be residual_in
  const float* norm_weight = nullptr;    // [in_features]; null: no norm
  float norm_eps = 1e-6f;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  const float* epilogue_residual = nullptr;  // [num_rows, out], stride of the (one) segment
  float swiglu_limit = 0;                // 0: no clamp
  absl::Span<const OutputSegment> outputs;  // columns sum to out_features (kSwiGlu: half of it)
  std::byte* workspace = nullptr;        // Backend::LinearWorkspaceBytes; may be null where that is 0
};

// Per-head matrices: W_UK (transposed) and W_UV of MLA.  out[t, h, :] = W_h in[t, h, :].
class PackedHeadLinear {
 public:
  virtual ~PackedHeadLinear() = default;
  int32_t num_heads() const { return num_heads_; }
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }

 protected:
  PackedHeadLinear(int32_t num_heads, int64_t out_features, int64_t in_features)
      : num_heads_(num_heads), out_features_(out_features), in_features_(in_features) {}

 private:
  int32_t num_heads_;
  int64_t out_features_;
  int64_t in_features_;
};

// Which rows of a stacked per-head tensor [num_heads * head_rows, cols] form W_h, and how.
struct HeadSlice {
  int32_t num_heads = 0;
  int64_t head_rows = 0;                 // rows of one head in the tensor
  int64_t row_begin = 0;                 // first row used within a head
  int64_t row_count = 0;
  bool transpose = false;                // false: W_h = slice [row_count, cols]; true: its transpose
};

struct HeadLinearParams {
  const PackedHeadLinear* weight = nullptr;
  int32_t num_rows = 0;
  const float* input = nullptr;          // [num_rows, num_heads, in_features]
  int64_t input_row_stride = 0;          // elements
  int64_t input_head_stride = 0;
  float* output = nullptr;               // [num_rows, num_heads, out_features]
  uint16_t* rounded_output = nullptr;    // instead of output: the same in bf16; not on the CPU
  int64_t output_row_stride = 0;
  int64_t output_head_stride = 0;
};

// What every backend refuses.  Errors: kInvalidArgument.
absl::Status CheckLinear(const LinearParams& params);
absl::Status CheckHeadSlice(const WeightTensor& tensor, const HeadSlice& slice);
absl::Status CheckHeadLinear(const HeadLinearParams& params);

}  // namespace kernels

#endif  // KERNELS_LINEAR_H_

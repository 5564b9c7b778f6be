// SparseDecode on tensor cores, for DeepSeek's latent (512 + 64) and V4's entries (448 + 64, their
// own value) in bf16 or fp8 pages: bf16 queries, keys and weights, float32 scores and sums; e4m3
// codes that are no numbers count as 480.  A sibling of sparse_decode.cu's general form, for
// devices that may round activations to bf16.
//
// Few rows have their entries shared out over blocks of threads.  Two of them are a cluster, which
// folds their parts; those of more blocks a second kernel combines, for clusters of four and more
// find no room for as many blocks as there are multiprocessors.  Results are the same in every run,
// but where a row is cut depends on how many rows there are.

#ifndef KERNELS_CUDA_SPARSE_LATENT_H_
#define KERNELS_CUDA_SPARSE_LATENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/sparse_list.h"
#include "kernels/sparse_decode.h"

namespace kernels::cuda {

// Results over parts of a row's entries; one part is not stored.  A view.
struct SparseParts {
  float* values = nullptr;  // [num_rows, num_parts, num_heads, 512]
  float* lse = nullptr;     // [num_rows, num_parts, num_heads]
};

// Bounds num_rows times the parts of a row, where a row has more than one.
inline constexpr int32_t kMaxSparseParts = 132;

bool CanRunSparseLatent(const SparseDecodeParams& params);

// values [num_rows, num_heads, 512]: before W_UV, and after sink and inverse rotation.  `list`:
// room, for rows whose lists have something between their entries.  REQUIRES: CanRunSparseLatent.
absl::Status SparseLatent(const Launcher& launcher, const SparseDecodeParams& params,
                          const SparseList& list, const SparseParts& parts, float* values,
                          int64_t row_stride, int64_t head_stride);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_LATENT_H_

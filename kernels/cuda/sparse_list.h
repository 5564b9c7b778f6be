// The entries that rows attend, without what is no entry between them: made from the sources' lists
// of indices by a kernel before the general form's, by the tensor-core form's blocks themselves.

#ifndef KERNELS_CUDA_SPARSE_LIST_H_
#define KERNELS_CUDA_SPARSE_LIST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/sparse_decode.h"

namespace kernels::cuda {

// Entry i of row r is slots[r * stride + i], of source 0 for i < counts[2 r], of source 1 for the
// counts[2 r + 1] after them.  A view, passed to kernels by value.
struct SparseList {
  int32_t* slots = nullptr;   // [num_rows, stride]
  int32_t* counts = nullptr;  // [num_rows, 2]
  int64_t stride = 0;
};

absl::Status ListEntries(const Launcher& launcher, const SparseDecodeParams& params,
                         const SparseList& list);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_LIST_H_

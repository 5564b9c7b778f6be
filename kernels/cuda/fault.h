// Fault: how a kernel reports what its launcher could not see.  A kernel that meets an index or a
// value that cannot be does not dereference it; it notes the fault and Synchronize returns it.
//
// One word in pinned host memory that every kernel may write: one 16-byte store, so that a reader
// never sees halves of two faults.  Of several faults of a step one is kept.

#ifndef KERNELS_CUDA_FAULT_H_
#define KERNELS_CUDA_FAULT_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"

namespace kernels::cuda {

enum class FaultKind : int32_t {
  kNone = 0,
  kPosition,   // index: row, value: position outside the rope table
  kNoBlock,    // index: sequence, value: position without a block
  kBadSample,  // index: sample; a sampling parameter is out of range
};

struct alignas(16) Fault {
  FaultKind kind;
  int32_t index;
  int64_t value;
};

#if defined(__CUDACC__)
__device__ inline void NoteFault(Fault* fault, FaultKind kind, int32_t index, int64_t value) {
  *reinterpret_cast<int4*>(fault) =
      make_int4(static_cast<int32_t>(kind), index, static_cast<int32_t>(value),
                static_cast<int32_t>(value >> 32));
}
#endif

// OK for kNone, else kInternal in one sentence.
absl::Status FaultStatus(const Fault& fault);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FAULT_H_

// RaggedMha on the CPU: contract in kernels/ragged_mha.h.

#ifndef KERNELS_CPU_RAGGED_MHA_H_
#define KERNELS_CPU_RAGGED_MHA_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ragged_mha.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes; nothing is written then.
absl::Status RaggedMha(ThreadPool& pool, const RaggedMhaParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_RAGGED_MHA_H_

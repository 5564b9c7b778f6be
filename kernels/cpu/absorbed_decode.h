// AbsorbedDecode on the CPU: contract in kernels/absorbed_decode.h.
//
// Splits are computed in waves of at most as many partial results as the workspace holds, and
// folded into the result in ascending order after each wave; how they fall into waves changes no
// bit.

#ifndef KERNELS_CPU_ABSORBED_DECODE_H_
#define KERNELS_CPU_ABSORBED_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/absorbed_decode.h"
#include "kernels/cpu/thread_pool.h"

namespace kernels::cpu {

// REQUIRES: params.w_uv, if given, was made by PackHeadLinear (head_linear.h).
// Errors: kInvalidArgument for impossible shapes, splits that do not cover a sequence's keys in
// order, or a block table that has no block for a key; nothing is written then.
absl::Status AbsorbedDecode(ThreadPool& pool, const AbsorbedDecodeParams& params);

// Enough for every call with at most max_rows rows, each of a sequence with at most
// max_splits_per_seq splits.
int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                     int32_t num_heads, int32_t kv_lora_rank);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_ABSORBED_DECODE_H_

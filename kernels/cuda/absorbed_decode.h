// AbsorbedDecode on CUDA: contract in kernels/absorbed_decode.h.

#ifndef KERNELS_CUDA_ABSORBED_DECODE_H_
#define KERNELS_CUDA_ABSORBED_DECODE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/absorbed_decode.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

// A key without a block counts as zeros; Synchronize reports it.
absl::Status AbsorbedDecode(const Launcher& launcher, const AbsorbedDecodeParams& params);

int64_t AbsorbedDecodeWorkspaceBytes(int32_t max_rows, int32_t max_splits_per_seq,
                                     int32_t num_heads, int32_t kv_lora_rank);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_ABSORBED_DECODE_H_

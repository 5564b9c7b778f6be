// StoreKv, GatherKv, Rope and PrepareAttention on CUDA: contracts in kernels/store_kv.h.  The bytes
// that StoreKv writes are those that the CPU writes.

#ifndef KERNELS_CUDA_STORE_KV_H_
#define KERNELS_CUDA_STORE_KV_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/store_kv.h"

namespace kernels::cuda {

// A row whose position is outside the rope table is not written; Synchronize reports it.
absl::Status StoreKv(const Launcher& launcher, const StoreKvParams& params);
absl::Status GatherKv(const Launcher& launcher, const GatherKvParams& params);
// Errors: kUnimplemented for a format that latents do not have.
absl::Status CheckLatentFormat(const KvPages& pages);
absl::Status Rope(const Launcher& launcher, const RopeParams& params);
// One kernel, where W_UK is stored in bf16.
absl::Status PrepareAttention(const Launcher& launcher, const PrepareAttentionParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_STORE_KV_H_

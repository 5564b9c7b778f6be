// StoreKv where it writes more than latents, Rope with a norm, and CopyKvEntries: the general
// forms, for every format.  Contracts in kernels/store_kv.h; store_kv.h has the common cases.

#ifndef KERNELS_CUDA_STORE_ENTRIES_H_
#define KERNELS_CUDA_STORE_ENTRIES_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/store_kv.h"

namespace kernels::cuda {

// REQUIRES: CheckStoreKv is OK.
absl::Status StoreEntries(const Launcher& launcher, const StoreKvParams& params);
// REQUIRES: CheckRope is OK, there are rotary values and heads.
absl::Status NormedRope(const Launcher& launcher, const RopeParams& params);
absl::Status CopyKvEntries(const Launcher& launcher, const CopyKvEntriesParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_STORE_ENTRIES_H_

// CompressKv on CUDA: contract in kernels/compress_kv.h.

#ifndef KERNELS_CUDA_COMPRESS_KV_H_
#define KERNELS_CUDA_COMPRESS_KV_H_

#include "absl/status/status.h"
#include "kernels/compress_kv.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

// An entry whose position is outside the rope table, or without a block, is not written;
// Synchronize reports it.
absl::Status CompressKv(const Launcher& launcher, const CompressKvParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_COMPRESS_KV_H_

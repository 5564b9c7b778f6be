// IndexerLogits on tensor cores, for 64 heads of 128 values, float32 sums: bf16 queries over bf16
// keys, e4m3 queries over e4m3 keys.  A sibling of indexer_logits.cu's general form, for devices
// that may round activations.  A query's e4m3 numbers have a power of two as scale, one a head, as
// in the released models (models.md 6.3).

#ifndef KERNELS_CUDA_INDEX_PRODUCTS_H_
#define KERNELS_CUDA_INDEX_PRODUCTS_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/indexer.h"

namespace kernels::cuda {

bool CanRunIndexProducts(const IndexerLogitsParams& params);

// REQUIRES: CanRunIndexProducts, num_rows > 0.
absl::Status IndexProducts(const Launcher& launcher, const IndexerLogitsParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_INDEX_PRODUCTS_H_

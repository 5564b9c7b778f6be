// IndexerLogits on tensor cores, for 64 heads of 128 values over bf16 or fp8 keys: bf16 queries and
// keys, float32 sums.  A sibling of indexer_logits.cu's general form, for devices that may round
// activations to bf16.

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

// IndexerLogits and TopKSlots on CUDA: contracts in kernels/indexer.h.

#ifndef KERNELS_CUDA_INDEXER_H_
#define KERNELS_CUDA_INDEXER_H_

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/indexer.h"

namespace kernels::cuda {

// Both read positions, row_to_seq and the block table while the stream's kernel before may still
// run: it does not write them.

// A key without a block scores as zeros; Synchronize reports it.  A row of a sequence without any
// block (padded) sees nothing.
absl::Status IndexerLogits(const Launcher& launcher, const IndexerLogitsParams& params);
// A key without a block becomes -1; Synchronize reports it, and a row that sees more keys than its
// logits have room for.
absl::Status TopKSlots(const Launcher& launcher, const TopKSlotsParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_INDEXER_H_

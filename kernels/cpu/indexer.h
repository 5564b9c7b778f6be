// IndexerLogits and TopKSlots on the CPU: contracts in kernels/indexer.h.

#ifndef KERNELS_CPU_INDEXER_H_
#define KERNELS_CPU_INDEXER_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/indexer.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes, or a row that sees keys without a block; nothing
// is computed then.
absl::Status IndexerLogits(ThreadPool& pool, const IndexerLogitsParams& params);
absl::Status TopKSlots(ThreadPool& pool, const TopKSlotsParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_INDEXER_H_

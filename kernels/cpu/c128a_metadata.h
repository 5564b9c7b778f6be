// C128AMetadata on the CPU: contract in kernels/c128a_metadata.h.

#ifndef KERNELS_CPU_C128A_METADATA_H_
#define KERNELS_CPU_C128A_METADATA_H_

#include "absl/status/status.h"
#include "kernels/c128a_metadata.h"
#include "kernels/cpu/thread_pool.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible sizes, or a row that sees more entries than `width`;
// nothing is written then.
absl::Status C128AMetadata(ThreadPool& pool, const C128AMetadataParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_C128A_METADATA_H_

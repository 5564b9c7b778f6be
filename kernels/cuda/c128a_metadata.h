// C128AMetadata on CUDA: contract in kernels/c128a_metadata.h.

#ifndef KERNELS_CUDA_C128A_METADATA_H_
#define KERNELS_CUDA_C128A_METADATA_H_

#include "absl/status/status.h"
#include "kernels/c128a_metadata.h"
#include "kernels/cuda/device.h"

namespace kernels::cuda {

// A row that sees more entries than the width gets none; Synchronize reports it.
absl::Status C128AMetadata(const Launcher& launcher, const C128AMetadataParams& params);

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_C128A_METADATA_H_

// What the second-level cache does with the lines of a copy: a hint of 64 bits, as createpolicy
// makes it.
//
// A copy takes its hint from uniform registers.  Given as a kernel's parameter it is loaded into
// them once, as the default is; of a constant they are set anew before every few copies, and a
// created hint is moved there before each.

#ifndef KERNELS_CUDA_CACHE_POLICY_H_
#define KERNELS_CUDA_CACHE_POLICY_H_

#include <cstdint>

namespace kernels::cuda {

using CachePolicy = uint64_t;

// Lines that are read once: they make room before any others do.
inline constexpr CachePolicy kEvictFirst = 0x12f0000000000000;
// As without a hint.  What createpolicy calls evict_normal, 0x16f0000000000000, is something else:
// a decode step's weights marked so took it from 0.75 to 0.80 ms.
inline constexpr CachePolicy kNoHint = 0x1000000000000000;

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_CACHE_POLICY_H_

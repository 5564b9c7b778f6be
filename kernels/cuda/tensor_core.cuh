// The tensor cores' bf16 product and the loads that feed it, one function an instruction.
//
// Lane l of a warp is (g, t) = (l / 4, l % 4).  mma.m16n8k16:
//   a[0] (row g,     k 2t, 2t + 1)      a[1] (row g + 8, the same k)
//   a[2] (row g,     k 2t + 8, 2t + 9)  a[3] (row g + 8, the same k)
//   b[0] (k 2t, 2t + 1, column g)       b[1] (k 2t + 8, 2t + 9, column g)
//   d[0], d[1] (row g, columns 2t, 2t + 1)   d[2], d[3] (row g + 8, the same columns)
// The lower k is in the lower half of a word.  The order of k is free as long as a and b agree.

#ifndef KERNELS_CUDA_TENSOR_CORE_CUH_
#define KERNELS_CUDA_TENSOR_CORE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cache_policy.h"

namespace kernels::cuda {

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

// d += a b.
__device__ inline void Mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values from shared memory; lane l gives the address of row l % 8 of
// matrix l / 8 and gets of each matrix (row g, columns 2t, 2t + 1).
__device__ inline void LoadMatrices(uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}
// The same, transposed: of each matrix (rows 2t, 2t + 1, column g).
__device__ inline void LoadMatricesTransposed(uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

// The opposite: matrix l / 8's column l % 8, 8 values, goes where lane l says.
__device__ inline void StoreMatricesTransposed(void* column, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(column))), "r"(a), "r"(b),
                 "r"(c), "r"(d)
               : "memory");
}

// 16 bytes of memory that is read once: past the first-level cache.
__device__ inline Words4 LoadStreaming(const void* from) {
  Words4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// 16 bytes to shared memory in the background; zeros if not `valid`, and then `from` is not read.
__device__ inline void CopyAsync(void* shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(from),
                 "r"(valid ? 16 : 0));
}
// The same from `from` plus kFrom bytes to an address of shared memory plus kTo, of memory that is
// known to exist.
template <int kTo, int kFrom>
__device__ inline void CopyAsyncStreaming(uint32_t to, const void* from, CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0 + %2], [%1 + %3], 16, %4;"
               :
               : "r"(to), "l"(from), "n"(kTo), "n"(kFrom), "l"(policy));
}
// 16 bytes at an address of shared memory; after WaitForCopies.
__device__ inline Words4 LoadShared(uint32_t from) {
  Words4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from));
  return words;
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }
// All but the newest `kPending` groups have arrived (this thread's; a barrier shares them).
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// Two values rounded to bf16, the first in the lower half.
__device__ inline uint32_t PackBfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TENSOR_CORE_CUH_

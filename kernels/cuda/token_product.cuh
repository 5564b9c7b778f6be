// The warpgroup's bf16 product (warpgroup_product.cuh) of 64 rows with 16, 32 .. 192 columns.

#ifndef KERNELS_CUDA_TOKEN_PRODUCT_CUH_
#define KERNELS_CUDA_TOKEN_PRODUCT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// d += a b, a and b as DescribeRows says; kSums: half the columns.
template <int kSums>
__device__ void MultiplyTokens(float (&d)[kSums], uint64_t a, uint64_t b);

#define FERRY_SUMS(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FERRY_TOKEN_PRODUCT(columns, names, a_name, b_name, ...)                          \
  template <>                                                                             \
  __device__ inline void MultiplyTokens(float(&d)[columns / 2], uint64_t a, uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names \
                 "}, " a_name ", " b_name ", 1, 1, 1, 0, 0;"                              \
                 : __VA_ARGS__                                                            \
                 : "l"(a), "l"(b));                                                       \
  }
#define FERRY_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FERRY_NAMES_16 FERRY_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FERRY_NAMES_24 FERRY_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FERRY_NAMES_32 FERRY_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FERRY_NAMES_40 FERRY_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FERRY_NAMES_48 FERRY_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FERRY_NAMES_56 FERRY_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FERRY_NAMES_64 FERRY_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FERRY_NAMES_72 FERRY_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FERRY_NAMES_80 FERRY_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FERRY_NAMES_88 FERRY_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FERRY_NAMES_96 FERRY_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
FERRY_TOKEN_PRODUCT(16, FERRY_NAMES_8, "%8", "%9", FERRY_SUMS(0))
FERRY_TOKEN_PRODUCT(32, FERRY_NAMES_16, "%16", "%17", FERRY_SUMS(0), FERRY_SUMS(8))
FERRY_TOKEN_PRODUCT(48, FERRY_NAMES_24, "%24", "%25", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16))
FERRY_TOKEN_PRODUCT(64, FERRY_NAMES_32, "%32", "%33", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24))
FERRY_TOKEN_PRODUCT(80, FERRY_NAMES_40, "%40", "%41", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32))
FERRY_TOKEN_PRODUCT(96, FERRY_NAMES_48, "%48", "%49", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40))
FERRY_TOKEN_PRODUCT(112, FERRY_NAMES_56, "%56", "%57", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48))
FERRY_TOKEN_PRODUCT(128, FERRY_NAMES_64, "%64", "%65", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48), FERRY_SUMS(56))
FERRY_TOKEN_PRODUCT(144, FERRY_NAMES_72, "%72", "%73", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48), FERRY_SUMS(56),
                    FERRY_SUMS(64))
FERRY_TOKEN_PRODUCT(160, FERRY_NAMES_80, "%80", "%81", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48), FERRY_SUMS(56),
                    FERRY_SUMS(64), FERRY_SUMS(72))
FERRY_TOKEN_PRODUCT(176, FERRY_NAMES_88, "%88", "%89", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48), FERRY_SUMS(56),
                    FERRY_SUMS(64), FERRY_SUMS(72), FERRY_SUMS(80))
FERRY_TOKEN_PRODUCT(192, FERRY_NAMES_96, "%96", "%97", FERRY_SUMS(0), FERRY_SUMS(8), FERRY_SUMS(16),
                    FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40), FERRY_SUMS(48), FERRY_SUMS(56),
                    FERRY_SUMS(64), FERRY_SUMS(72), FERRY_SUMS(80), FERRY_SUMS(88))
#undef FERRY_SUMS
#undef FERRY_TOKEN_PRODUCT
#undef FERRY_NAMES_8
#undef FERRY_NAMES_16
#undef FERRY_NAMES_24
#undef FERRY_NAMES_32
#undef FERRY_NAMES_40
#undef FERRY_NAMES_48
#undef FERRY_NAMES_56
#undef FERRY_NAMES_64
#undef FERRY_NAMES_72
#undef FERRY_NAMES_80
#undef FERRY_NAMES_88
#undef FERRY_NAMES_96

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TOKEN_PRODUCT_CUH_

// The warpgroup's bf16 product (warpgroup_product.cuh) of 64 rows that threads hold in registers
// with 16, 32, 64, 96 or 128 columns.

#ifndef KERNELS_CUDA_HELD_PRODUCT_CUH_
#define KERNELS_CUDA_HELD_PRODUCT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// d = a b, or d += a b if `add`; a as tensor_core.cuh says, b as DescribeRows.  kSums: half the
// columns.
template <int kSums>
__device__ void MultiplyHeldRows(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool add);

#define FERRY_SUMS(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FERRY_HELD_PRODUCT(columns, names, a_names, b_name, add_name, ...)                      \
  template <>                                                                                   \
  __device__ inline void MultiplyHeldRows(float(&d)[columns / 2], const uint32_t(&a)[4],        \
                                          uint64_t b, bool add) {                               \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred p;\n"                                                                       \
        "setp.ne.b32 p, " add_name                                                              \
        ", 0;\n"                                                                                \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, {" a_names \
        "}, " b_name                                                                            \
        ", p, 1, 1, 0;\n"                                                                       \
        "}"                                                                                     \
        : __VA_ARGS__                                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));                \
  }
#define FERRY_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FERRY_NAMES_16 FERRY_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FERRY_NAMES_32 \
  FERRY_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FERRY_NAMES_48 \
  FERRY_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FERRY_NAMES_64 \
  FERRY_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
FERRY_HELD_PRODUCT(16, FERRY_NAMES_8, "%8, %9, %10, %11", "%12", "%13", FERRY_SUMS(0))
FERRY_HELD_PRODUCT(32, FERRY_NAMES_16, "%16, %17, %18, %19", "%20", "%21", FERRY_SUMS(0),
                   FERRY_SUMS(8))
FERRY_HELD_PRODUCT(64, FERRY_NAMES_32, "%32, %33, %34, %35", "%36", "%37", FERRY_SUMS(0),
                   FERRY_SUMS(8), FERRY_SUMS(16), FERRY_SUMS(24))
FERRY_HELD_PRODUCT(96, FERRY_NAMES_48, "%48, %49, %50, %51", "%52", "%53", FERRY_SUMS(0),
                   FERRY_SUMS(8), FERRY_SUMS(16), FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40))
FERRY_HELD_PRODUCT(128, FERRY_NAMES_64, "%64, %65, %66, %67", "%68", "%69", FERRY_SUMS(0),
                   FERRY_SUMS(8), FERRY_SUMS(16), FERRY_SUMS(24), FERRY_SUMS(32), FERRY_SUMS(40),
                   FERRY_SUMS(48), FERRY_SUMS(56))
#undef FERRY_SUMS
#undef FERRY_HELD_PRODUCT
#undef FERRY_NAMES_8
#undef FERRY_NAMES_16
#undef FERRY_NAMES_32
#undef FERRY_NAMES_48
#undef FERRY_NAMES_64

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_HELD_PRODUCT_CUH_

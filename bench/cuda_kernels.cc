// cuda_kernels [name]: every kernel by itself, beside its floor (bytes at the speed of a copy,
// products at the sustained rate), its bar and the best public kernel on the same GPU.
// With a name only the rows that contain it.

#include "bench/kernel_bench.h"

int main(int argc, char** argv) {
  bench::KernelBench bench(argc > 1 ? argv[1] : "");
  bench::TimeDecode(bench);
  bench::TimePrefill(bench);
  bench::TimeSparse(bench);
}

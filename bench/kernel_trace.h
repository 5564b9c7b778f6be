// When each kernel of a stretch of work ran on the GPU, as CUPTI's activity records tell: what runs
// side by side is seen side by side, kernels of recorded steps included.

#ifndef BENCH_KERNEL_TRACE_H_
#define BENCH_KERNEL_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct KernelSpan {
  std::string name;  // without arguments
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

// One at a time, and made before the process's first call of CUDA.  Ends the program with a
// sentence where CUPTI refuses, or where the build has none.  Not safe for use from several
// threads.
class KernelTrace {
 public:
  KernelTrace();
  ~KernelTrace();
  KernelTrace(const KernelTrace&) = delete;
  KernelTrace& operator=(const KernelTrace&) = delete;

  void Start();
  // What has run since Start, in order of its start.  The device must be idle.
  std::vector<KernelSpan> Stop();
};

}  // namespace bench

#endif  // BENCH_KERNEL_TRACE_H_

// A build without CUPTI.

#include <cstdio>
#include <cstdlib>

#include "bench/kernel_trace.h"

namespace bench {

KernelTrace::KernelTrace() {
  std::fprintf(stderr, "kernel trace: this build has no CUPTI, which the CUDA toolkit brings\n");
  std::exit(1);
}
KernelTrace::~KernelTrace() = default;
void KernelTrace::Start() {}
std::vector<KernelSpan> KernelTrace::Stop() { return {}; }

}  // namespace bench

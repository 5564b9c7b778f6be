// The CPU backend: float32 activations over weights in their stored format, AVX2 + FMA + F16C
// where the machine has them (chosen at run time), plain C++ elsewhere.

#ifndef KERNELS_CPU_CPU_BACKEND_H_
#define KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/backend.h"

namespace kernels::cpu {

// `num_threads` >= 1 threads share the work of a launch, the caller among them.
std::unique_ptr<Backend> CreateCpuBackend(int32_t num_threads);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_CPU_BACKEND_H_

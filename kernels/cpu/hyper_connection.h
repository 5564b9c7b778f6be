// HyperPre and HyperPost on the CPU: contract in kernels/hyper_connection.h.

#ifndef KERNELS_CPU_HYPER_CONNECTION_H_
#define KERNELS_CPU_HYPER_CONNECTION_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/hyper_connection.h"

namespace kernels::cpu {

// Errors: kInvalidArgument for impossible shapes; nothing is written then.
absl::Status HyperPre(ThreadPool& pool, const HyperPreParams& params);
absl::Status HyperPost(ThreadPool& pool, const HyperPostParams& params);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_HYPER_CONNECTION_H_

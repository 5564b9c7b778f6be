// HyperPre and HyperPost: V4's residual of several parallel streams, as two calls around a block.
//
//   f       = x[0] ++ x[1] ++ ...                          streams of a row, [num_streams * hidden]
//   m       = (fn f) / sqrt(mean(f^2) + norm_eps)
//   pre_j   = sigmoid(m[j] * scale[0] + base[j]) + eps
//   post_k  = 2 sigmoid(m[n + k] * scale[1] + base[n + k])                    n = num_streams
//   C[j, k] = m[2n + nj + k] * scale[2] + base[2n + nj + k]
//   comb    = softmax over k of C, + eps, then one step over columns and sinkhorn_iters - 1 steps
//   over
//             rows and columns; a step divides by (sum + eps)
//   HyperPre:   u    = sum_j pre_j x[j]                    the block's input
//   HyperPost:  x[k] <- post_k y + sum_j comb[j, k] x[j]   y: the block's output
//
// At the end of the network HyperPre only collapses: fn has n rows, scale one value, and there is
// no post and no comb.  A row's result does not depend, bit for bit, on the other rows of the call.
// Source: DeepSeek-V4 paper 2.2; models.md 7.2.

#ifndef KERNELS_HYPER_CONNECTION_H_
#define KERNELS_HYPER_CONNECTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear.h"

namespace kernels {

inline constexpr int32_t kMaxStreams = 16;

struct HyperPreParams {
  int32_t num_rows = 0;
  int32_t num_streams = 0;  // hc_mult
  int64_t hidden_size = 0;
  const float* streams = nullptr;    // [num_rows, num_streams, hidden_size]
  const PackedLinear* fn = nullptr;  // [mixes, num_streams * hidden_size], n (2 + n) mixes, or n
  const float* base = nullptr;       // [mixes]
  const float* scale = nullptr;      // [3], or [1]
  float norm_eps = 1e-6f;
  float eps = 1e-6f;            // hc_eps
  int32_t sinkhorn_iters = 20;  // >= 1
  float* mixes = nullptr;       // [num_rows, mixes], workspace
  float* output = nullptr;      // [num_rows, hidden_size]
  float* post = nullptr;        // [num_rows, num_streams]; null: collapse only
  float* comb = nullptr;        // [num_rows, num_streams (j), num_streams (k)]; null with post
};

struct HyperPostParams {
  int32_t num_rows = 0;
  int32_t num_streams = 0;
  int64_t hidden_size = 0;
  const float* block_output = nullptr;  // [num_rows, hidden_size]
  const float* post = nullptr;          // of HyperPre
  const float* comb = nullptr;
  float* streams = nullptr;  // [num_rows, num_streams, hidden_size], read and written
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckHyperPre(const HyperPreParams& params);
absl::Status CheckHyperPost(const HyperPostParams& params);

}  // namespace kernels

#endif  // KERNELS_HYPER_CONNECTION_H_

#include "kernels/cuda/grouped_route.h"

#include <algorithm>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kernels::cuda {
namespace {

// kRows rows a block, kExperts experts a warp at a time, kAhead steps of their weights under way.
template <int32_t kRows_, int32_t kExperts_, int32_t kAhead_, int32_t kThreads_>
struct RouteShape {
  static constexpr int32_t kRows = kRows_;
  static constexpr int32_t kExperts = kExperts_;
  static constexpr int32_t kAhead = kAhead_;
  static constexpr int32_t kThreads = kThreads_;
  static constexpr int32_t kWarps = kThreads / kWarpSize;
};
constexpr int64_t kStep = 4 * kWarpSize;  // values of a row that a warp takes at a time

struct RouteArgs {
  const float* input = nullptr;
  int64_t row_stride = 0;
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  const uint16_t* gate = nullptr;  // [experts, hidden]
  int32_t num_rows = 0;
  int64_t hidden = 0;          // a multiple of 8
  uint16_t* normed = nullptr;  // [rows, hidden]
  ExpertChoice choice;
};

__device__ float4 Widen(uint2 words) {
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000),
                     __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000));
}
__device__ double SquareSum(float4 v) {
  return static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y +
         static_cast<double>(v.z) * v.z + static_cast<double>(v.w) * v.w;
}

// Norm of kRows rows from `row_begin` on, to `rows` [kRows, hidden] in shared memory and, rounded,
// to args.normed.  Rows past the end are the last one again.
template <typename Shape>
__device__ void NormRows(const RouteArgs& args, int64_t row_begin, float* rows) {
  constexpr int32_t kRows = Shape::kRows;
  __shared__ double parts[Shape::kWarps][kRows];
  __shared__ float inverse[kRows];
  constexpr int64_t kBlockStep = 4 * Shape::kThreads;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const auto row_at = [&](int32_t r) { return min(row_begin + r, int64_t{args.num_rows - 1}); };
  double sums[kRows] = {};
#pragma unroll 2
  for (int64_t at = 4 * int64_t{threadIdx.x}; at < args.hidden; at += kBlockStep) {
    float4 v[kRows];
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      v[r] = *reinterpret_cast<const float4*>(args.input + row_at(r) * args.row_stride + at);
    }
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      *reinterpret_cast<float4*>(rows + r * args.hidden + at) = v[r];
      sums[r] += SquareSum(v[r]);
    }
  }
#pragma unroll
  for (int32_t r = 0; r < kRows; ++r) {
    sums[r] = WarpSum(sums[r]);
    if (threadIdx.x % kWarpSize == 0) parts[warp][r] = sums[r];
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    double sum = 0;
    for (int32_t w = 0; w < Shape::kWarps; ++w) sum += parts[w][threadIdx.x];
    inverse[threadIdx.x] = static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(args.hidden) + static_cast<double>(args.norm_eps)));
  }
  __syncthreads();
  for (int64_t at = 4 * int64_t{threadIdx.x}; at < args.hidden; at += kBlockStep) {
    const float4 n = *reinterpret_cast<const float4*>(args.norm_weight + at);
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      float4& to = *reinterpret_cast<float4*>(rows + r * args.hidden + at);
      const float4 v = make_float4(to.x * inverse[r] * n.x, to.y * inverse[r] * n.y,
                                   to.z * inverse[r] * n.z, to.w * inverse[r] * n.w);
      to = v;
      *reinterpret_cast<uint2*>(args.normed + row_at(r) * args.hidden + at) =
          make_uint2(PackBfloat16(v.x, v.y), PackBfloat16(v.z, v.w));
    }
  }
}

// A lane's weights of kExperts experts from `first` on.
template <typename Shape>
class GateWeights {
 public:
  __device__ GateWeights(const RouteArgs& args, int32_t first) : args_(args), first_(first) {
#pragma unroll
    for (int32_t i = 0; i < Shape::kAhead; ++i) Load(i);
  }
  // Of the next step, which is number `i` in a turn of kAhead.
  __device__ void Take(int32_t i, float4 (&weights)[Shape::kExperts]) {
#pragma unroll
    for (int32_t e = 0; e < Shape::kExperts; ++e) weights[e] = Widen(words_[i][e]);
    Load(i);
  }

 private:
  __device__ void Load(int32_t i) {
    const int64_t k = next_ + 4 * (threadIdx.x % kWarpSize);
    next_ += kStep;
    if (k >= args_.hidden) return;
#pragma unroll
    for (int32_t e = 0; e < Shape::kExperts; ++e) {
      const int64_t expert = min(first_ + e, args_.choice.num_experts - 1);
      words_[i][e] = *reinterpret_cast<const uint2*>(args_.gate + expert * args_.hidden + k);
    }
  }

  const RouteArgs& args_;
  const int32_t first_;
  int64_t next_ = 0;
  uint2 words_[Shape::kAhead][Shape::kExperts];
};

// Of the normed rows, and of what choosing needs later.
template <int32_t kRows>
__host__ __device__ constexpr size_t RowBytes(int64_t hidden, int32_t num_experts) {
  const size_t rows = sizeof(float) * static_cast<size_t>(kRows * hidden);
  const size_t choosing = kRows * RowShared::Bytes(num_experts);
  return rows > choosing ? rows : choosing;
}

// A block takes kRows rows: its warps the experts in turns, then one warp a row to choose.  Shared:
// the normed rows, later what choosing needs; the logits.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    RouteKernel(const __grid_constant__ MoeParams params, const __grid_constant__ RouteArgs args) {
  constexpr int32_t kRows = Shape::kRows;
  const int32_t num_experts = args.choice.num_experts;
  auto* rows = reinterpret_cast<float*>(DynamicShared());  // [kRows, hidden]
  auto* logits =
      reinterpret_cast<float*>(DynamicShared() + RowBytes<kRows>(args.hidden, num_experts));
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t row_begin = int64_t{blockIdx.x} * kRows;
  bool normed = false;
  for (int32_t first = warp * Shape::kExperts; first < num_experts || !normed;
       first += Shape::kWarps * Shape::kExperts) {
    GateWeights<Shape> weights(args, first);  // before the rows are there
    if (!normed) {
      WaitForPrevious();
      NormRows<Shape>(args, row_begin, rows);
      __syncthreads();
      normed = true;
    }
    float sums[Shape::kExperts][kRows] = {};
    for (int64_t base = 4 * lane; base < args.hidden; base += Shape::kAhead * kStep) {
#pragma unroll
      for (int32_t i = 0; i < Shape::kAhead; ++i) {
        const int64_t k = base + i * kStep;
        if (k >= args.hidden) break;
        float4 w[Shape::kExperts];
        weights.Take(i, w);
#pragma unroll
        for (int32_t r = 0; r < kRows; ++r) {
          const float4 x = *reinterpret_cast<const float4*>(rows + r * args.hidden + k);
#pragma unroll
          for (int32_t e = 0; e < Shape::kExperts; ++e) {
            float& sum = sums[e][r];
            sum = fmaf(x.w, w[e].w, fmaf(x.z, w[e].z, fmaf(x.y, w[e].y, fmaf(x.x, w[e].x, sum))));
          }
        }
      }
    }
#pragma unroll
    for (int32_t e = 0; e < Shape::kExperts; ++e) {
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
        const float sum = WarpSum(sums[e][r]);
        if (lane == 0 && first + e < num_experts) logits[r * num_experts + first + e] = sum;
      }
    }
  }
  __syncthreads();
  const int64_t row = row_begin + warp;
  if (warp >= kRows || row >= args.num_rows) return;
  ChooseExperts(params, row, logits + warp * num_experts,
                RowShared(DynamicShared(), warp, num_experts), args.choice.ids,
                args.choice.weights);
}

template <typename Shape>
absl::Status LaunchRoute(const Launcher& launcher, const MoeParams& params, const RouteArgs& args) {
  constexpr int32_t kRows = Shape::kRows;
  const size_t logits_bytes = sizeof(float) * static_cast<size_t>(kRows * args.choice.num_experts);
  return Launch(
      launcher, "moe route", RouteKernel<Shape>,
      {.grid = dim3(static_cast<uint32_t>(CeilDiv(args.num_rows, kRows))),
       .threads = Shape::kThreads,
       .shared_bytes = RowBytes<kRows>(args.hidden, args.choice.num_experts) + logits_bytes,
       .early = true},
      params, args);
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool CanRouteGroups(const MoeParams& params, int64_t hidden, const MatrixStack& gate_weight) {
  constexpr int64_t kMaxHidden = 8192;
  return gate_weight.num_parts == 1 && gate_weight.parts[0].dtype == DType::kBfloat16 &&
         gate_weight.parts[0].scales == nullptr && params.input_row_stride % 4 == 0 &&
         IsAligned(params.input) && IsAligned(params.norm_weight) && hidden % 8 == 0 &&
         hidden <= kMaxHidden;
}

absl::Status RouteGroups(const Launcher& launcher, const MoeParams& params, int64_t hidden,
                         const MatrixStack& gate_weight, uint16_t* normed,
                         const ExpertChoice& choice) {
  const RouteArgs args{.input = params.input,
                       .row_stride = params.input_row_stride,
                       .norm_weight = params.norm_weight,
                       .norm_eps = params.norm_eps,
                       .gate = static_cast<const uint16_t*>(gate_weight.parts[0].data),
                       .num_rows = params.num_rows,
                       .hidden = hidden,
                       .normed = normed,
                       .choice = choice};
  // A row a block as long as the multiprocessors take them in one go.
  if (params.num_rows <= 2 * launcher.device.num_sms) {
    return LaunchRoute<RouteShape<1, 4, 4, 512>>(launcher, params, args);
  }
  return LaunchRoute<RouteShape<4, 8, 1, 256>>(launcher, params, args);
}

}  // namespace kernels::cuda

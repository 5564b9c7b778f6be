#include "kernels/cuda/sparse_decode.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/kv_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/sparse_latent.h"
#include "kernels/cuda/sparse_list.h"
#include "kernels/cuda/sparse_result.cuh"
#include "kernels/scratch_carver.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

struct Workspace {
  float* values;  // [num_rows, num_heads, value_dim], before W_UV
  SparseList list;
  SparseParts parts;
};

int64_t LayOut(std::byte* base, int32_t num_rows, int64_t width, int32_t num_heads,
               int32_t value_dim, Workspace& work) {
  ScratchCarver carver(base);
  carver.Take(work.list.counts, int64_t{num_rows} * 2);
  carver.Take(work.list.slots, num_rows * width);
  carver.Take(work.values, int64_t{num_rows} * num_heads * value_dim);
  const int64_t part_vectors = int64_t{kMaxSparseParts} * num_heads;
  carver.Take(work.parts.values, part_vectors * value_dim);
  carver.Take(work.parts.lse, part_vectors);
  work.list.stride = width;
  return carver.size();
}

// Where a row's result goes before W_UV.
struct Values {
  float* data;
  int64_t row_stride;  // elements
  int64_t head_stride;
};

// Grid: tiles of heads, rows.
__global__ void __launch_bounds__(kAttentionThreads)
    SparseDecodeKernel(SparseDecodeParams params, SparseList list, Values values, Fault* fault) {
  auto& shared = *reinterpret_cast<AttentionShared*>(DynamicShared());
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kTileVectors;
  const int32_t num_vectors = min(kTileVectors, params.num_heads - first);
  const int32_t first_count = list.counts[2 * row];
  const int32_t count = first_count + list.counts[2 * row + 1];
  if (threadIdx.x < kTileVectors) shared.num_seen[threadIdx.x] = count;
  const int32_t dim = params.dim;
  const int32_t* slots = list.slots + row * list.stride;
  const auto load_query = [&](int32_t i, int32_t d) {
    const int64_t head = first + i;
    return d < dim ? params.q[row * params.q_row_stride + head * params.q_head_stride + d]
                   : params.q_rope[row * params.q_rope_row_stride +
                                   head * params.q_rope_head_stride + d - dim];
  };
  const auto load_key = [&](int64_t j, int32_t d) {
    const KvPages& pages = params.sources[j < first_count ? 0 : 1].pages;
    return LoadValue(PartsOfSlot(pages, slots[j], dim, params.rope_dim), pages.format, dim, d);
  };
  const AttentionShape shape{dim + params.rope_dim, params.value_dim, params.softmax_scale};
  AttendKeys(shared, shape, num_vectors, 0, count, load_query, load_key, load_key);

  const int32_t vector = static_cast<int32_t>(threadIdx.x) / kThreadsPerVector;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kThreadsPerVector;
  if (vector >= num_vectors) return;
  const int32_t head = first + vector;
  float* acc = Accumulators(shared) + int64_t{vector} * params.value_dim;
  const float lse = LseOf(shared, vector);
  float scale = OutputScale(shared, vector);
  if (params.sink != nullptr) scale *= SinkFactor(params.sink[head], lse);
  if (lane == 0 && params.lse != nullptr) params.lse[head * params.lse_stride + row] = lse;
  for (int32_t d = lane; d < params.value_dim; d += kThreadsPerVector) acc[d] *= scale;
  const RopeTable& rope = params.inverse_rope;
  const uint32_t vector_lanes =
      ((1u << kThreadsPerVector) - 1)
      << (threadIdx.x % kWarpSize / kThreadsPerVector * kThreadsPerVector);
  if (rope.rope_dim > 0 && params.positions[row] >= 0) {
    const int32_t position = params.positions[row];
    if (!HasPosition(rope, position)) {
      NoteFault(fault, FaultKind::kPosition, row, position);
    } else {
      __syncwarp(vector_lanes);
      for (int32_t i = lane; i < rope.rope_dim / 2; i += kThreadsPerVector) {
        RotatePair(rope, position, -1.0f, i, acc + params.value_dim - rope.rope_dim);
      }
    }
  }
  __syncwarp(vector_lanes);
  float* out = values.data + row * values.row_stride + head * values.head_stride;
  for (int32_t d = lane; d < params.value_dim; d += kThreadsPerVector) out[d] = acc[d];
}

int64_t WidthOf(const SparseDecodeParams& params) {
  int64_t width = 0;
  for (const SparseSource& source : params.sources) {
    if (source.indices != nullptr) width += source.width;
  }
  return width;
}

absl::Status RunGeneral(const Launcher& launcher, const SparseDecodeParams& params,
                        const SparseList& list, const Values& values) {
  const size_t shared_bytes = AttentionSharedBytes(params.value_dim);
  if (shared_bytes > kMaxSharedBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("sparse_decode: no cuda kernel for a value_dim of ", params.value_dim));
  }
  return Launch(launcher, "sparse_decode", SparseDecodeKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(params.num_heads, kTileVectors)),
                              static_cast<uint32_t>(params.num_rows)),
                 .threads = kAttentionThreads,
                 .shared_bytes = shared_bytes,
                 .early = true},
                params, list, values, launcher.device.fault);
}

}  // namespace

int64_t SparseDecodeWorkspaceBytes(int32_t max_rows, int32_t max_width, int32_t num_heads,
                                   int32_t value_dim) {
  Workspace work;
  return LayOut(nullptr, max_rows, max_width, num_heads, value_dim, work);
}

absl::Status SparseDecode(const Launcher& launcher, const SparseDecodeParams& params) {
  RETURN_IF_ERROR(CheckSparseDecode(params));
  if (params.num_rows == 0) return absl::OkStatus();
  if (params.workspace == nullptr) {
    return absl::InvalidArgumentError("sparse_decode: needs a workspace on cuda");
  }
  Workspace work;
  LayOut(params.workspace, params.num_rows, WidthOf(params), params.num_heads, params.value_dim,
         work);
  Values values{params.out, params.out_row_stride, params.out_head_stride};
  if (params.w_uv != nullptr) {
    values = {work.values, int64_t{params.num_heads} * params.value_dim, params.value_dim};
  }
  if (launcher.device.bfloat16 && CanRunSparseLatent(params)) {
    RETURN_IF_ERROR(SparseLatent(launcher, params, work.list, work.parts, values.data,
                                 values.row_stride, values.head_stride));
  } else {
    RETURN_IF_ERROR(ListEntries(launcher, params, work.list));
    RETURN_IF_ERROR(RunGeneral(launcher, params, work.list, values));
  }
  if (params.w_uv == nullptr) return absl::OkStatus();
  HeadLinearParams linear;
  linear.weight = params.w_uv;
  linear.num_rows = params.num_rows;
  linear.input = values.data;
  linear.input_row_stride = values.row_stride;
  linear.input_head_stride = values.head_stride;
  linear.output = params.out;
  linear.output_row_stride = params.out_row_stride;
  linear.output_head_stride = params.out_head_stride;
  return HeadLinear(launcher, linear);
}

}  // namespace kernels::cuda

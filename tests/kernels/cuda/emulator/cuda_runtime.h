// Stands in for CUDA's own header where kernels run on an emulator (emulator.h): the part of the
// language and of the runtime that kernels/cuda uses, over host memory.  Launches and copies have
// happened when the call returns.

#ifndef TESTS_KERNELS_CUDA_EMULATOR_CUDA_RUNTIME_H_
#define TESTS_KERNELS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __host__
#define __device__
#define __global__
// Blocks run one after the other on one thread, so a block's shared memory is the thread's.
#define __shared__ thread_local
#define __launch_bounds__(...)
#define __align__(n)
#define __grid_constant__

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
  constexpr dim3() = default;
  constexpr explicit(false) dim3(uint32_t x, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = struct CudaStream*;
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaHostAllocMapped = 2;

struct cudaDeviceProp {
  char name[64];
  int major, minor, multiProcessorCount;
  size_t totalGlobalMem;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaSetDevice(int device);
// Fresh memory is full of NaN bytes; memory that is still allocated at the end is a leak.
cudaError_t cudaMalloc(void** data, size_t size_bytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaHostAlloc(void** data, size_t size_bytes, unsigned flags);
cudaError_t cudaFreeHost(void* data);
cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int value, size_t size_bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

#include "tests/kernels/cuda/emulator/emulator.h"

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  return emulator::Run(*config, [&] { kernel(static_cast<Params>(args)...); });
}

inline constexpr emulator::Indices<&emulator::ThreadState::thread_index> threadIdx;
inline constexpr emulator::Indices<&emulator::ThreadState::block_index> blockIdx;
inline constexpr emulator::Indices<&emulator::ThreadState::block_dim> blockDim;
inline constexpr emulator::Indices<&emulator::ThreadState::grid_dim> gridDim;

inline void __syncthreads() { emulator::BlockBarrier(); }
inline void __syncwarp(uint32_t = 0xffffffff) { emulator::WarpBarrier(); }

template <typename T>
T __shfl_sync(uint32_t, T value, int32_t lane) {
  return emulator::Exchange(value, lane);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int32_t mask) {
  return emulator::Exchange(value, emulator::Lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, uint32_t delta) {
  const int32_t lane = emulator::Lane() - static_cast<int32_t>(delta);
  return emulator::Exchange(value, lane < 0 ? emulator::Lane() : lane);
}
template <typename T>
T __shfl_down_sync(uint32_t, T value, uint32_t delta) {
  const int32_t lane = emulator::Lane() + static_cast<int32_t>(delta);
  return emulator::Exchange(value, lane > 31 ? emulator::Lane() : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) { return emulator::Ballot(vote); }

template <typename T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at += value;
  return old;
}
template <typename T>
T atomicMax(T* at, T value) {
  const T old = *at;
  if (value > old) *at = value;
  return old;
}
inline void __threadfence() {}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int32_t __popc(uint32_t bits) { return __builtin_popcount(bits); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

#endif  // TESTS_KERNELS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_runtime.h"

// Switches stacks: saves the registers that a call preserves on this stack, notes its top at *from,
// and returns on the stack whose top was noted as `to`.
extern "C" void ferry_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl ferry_emulator_switch
.type ferry_emulator_switch, @function
ferry_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ferry_emulator_switch, .-ferry_emulator_switch
.section .note.GNU-stack,"",@progbits
.text
)");

namespace kernels::cuda {
// What launch.cuh declares as the block's dynamic shared memory.
extern thread_local std::byte dynamic_shared[];
alignas(1024) thread_local std::byte dynamic_shared[232448];
}  // namespace kernels::cuda

namespace emulator {
namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kWarpSize = 32;
constexpr size_t kStackBytes = size_t{256} << 10;

enum class Wait : uint8_t { kNothing, kBlock, kWarp, kDone };

struct Fiber {
  ThreadState state;
  Wait wait = Wait::kNothing;
  void* stack_top = nullptr;
  uint32_t num_exchanges = 0;
};

// One block at work.
struct Block {
  std::vector<Fiber> fibers;
  // Words of the exchange before last may be overwritten: every lane has passed it.
  std::vector<uint64_t> words[2];
  Fiber* running = nullptr;
  void* scheduler_top = nullptr;
  const std::function<void()>* thread = nullptr;
};

Block& TheBlock() {
  static thread_local Block block;
  return block;
}

std::byte* Stacks() {
  static thread_local std::byte* stacks =
      static_cast<std::byte*>(mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return stacks;
}

void Suspend(Wait wait) {
  Block& block = TheBlock();
  Fiber& self = *block.running;
  self.wait = wait;
  ferry_emulator_switch(&self.stack_top, block.scheduler_top);
}

void FiberMain() {
  (*TheBlock().thread)();
  Suspend(Wait::kDone);
  std::abort();  // a finished fiber is not resumed
}

// Makes the fiber start in FiberMain.
void Prepare(Fiber& fiber, std::byte* stack) {
  auto* top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // keeps FiberMain's frame 16-byte aligned as after a call
  *--top = reinterpret_cast<void*>(&FiberMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_top = top;
  fiber.wait = Wait::kNothing;
  fiber.num_exchanges = 0;
}

// Releases those whose barrier is complete.  False: there is none.
bool ReleaseBarriers(Block& block) {
  bool all_at_block = true;
  bool released = false;
  const size_t count = block.fibers.size();
  for (size_t warp = 0; warp < count; warp += kWarpSize) {
    const size_t end = std::min(warp + kWarpSize, count);
    bool all_at_warp = true;
    for (size_t i = warp; i < end; ++i) {
      const Wait wait = block.fibers[i].wait;
      if (wait != Wait::kDone && wait != Wait::kWarp) all_at_warp = false;
      if (wait != Wait::kDone && wait != Wait::kBlock) all_at_block = false;
    }
    for (size_t i = warp; all_at_warp && i < end; ++i) {
      if (block.fibers[i].wait != Wait::kWarp) continue;
      block.fibers[i].wait = Wait::kNothing;
      released = true;
    }
  }
  for (Fiber& fiber : block.fibers) {
    if (!all_at_block || fiber.wait != Wait::kBlock) continue;
    fiber.wait = Wait::kNothing;
    released = true;
  }
  return released;
}

void RunBlock(Block& block) {
  do {
    for (Fiber& fiber : block.fibers) {
      if (fiber.wait != Wait::kNothing) continue;
      block.running = &fiber;
      ferry_emulator_switch(&block.scheduler_top, fiber.stack_top);
    }
  } while (ReleaseBarriers(block));
  for (const Fiber& fiber : block.fibers) {
    if (fiber.wait == Wait::kDone) continue;
    std::fprintf(stderr,
                 "emulator: thread %d of block (%u, %u, %u) waits at a %s barrier forever\n",
                 fiber.state.index, fiber.state.block_index.x, fiber.state.block_index.y,
                 fiber.state.block_index.z, fiber.wait == Wait::kBlock ? "block" : "warp");
    std::abort();
  }
}

}  // namespace

ThreadState& Current() { return TheBlock().running->state; }
void BlockBarrier() { Suspend(Wait::kBlock); }
void WarpBarrier() { Suspend(Wait::kWarp); }

const uint64_t* ShareWord(uint64_t word) {
  Block& block = TheBlock();
  Fiber& self = *block.running;
  std::vector<uint64_t>& words = block.words[self.num_exchanges++ % 2];
  const int32_t index = self.state.index;
  words[index] = word;
  WarpBarrier();
  return &words[index / kWarpSize * kWarpSize];
}

uint32_t Ballot(bool vote) {
  const uint64_t* words = ShareWord(vote ? 1 : 0);
  uint32_t votes = 0;
  for (int32_t lane = 0; lane < kWarpSize; ++lane) {
    if (words[lane] != 0) votes |= 1u << lane;
  }
  return votes;
}

cudaError_t Run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  const dim3 size = config.blockDim, grid = config.gridDim;
  const uint64_t count = uint64_t{size.x} * size.y * size.z;
  if (count == 0 || count > kMaxThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.y > 65535 || grid.z > 65535 || config.dynamicSmemBytes > 232448) {
    return cudaErrorInvalidValue;
  }
  Block& block = TheBlock();
  block.thread = &thread;
  block.fibers.resize(count);
  for (auto& words : block.words) words.assign((count + 31) / 32 * 32, 0);
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) {
        std::memset(kernels::cuda::dynamic_shared, 0xff, config.dynamicSmemBytes);
        for (uint32_t i = 0; i < count; ++i) {
          Fiber& fiber = block.fibers[i];
          Prepare(fiber, Stacks() + i * kStackBytes);
          fiber.state = {.thread_index = {i % size.x, i / size.x % size.y, i / size.x / size.y},
                         .block_index = {x, y, z},
                         .block_dim = size,
                         .grid_dim = grid,
                         .index = static_cast<int32_t>(i)};
        }
        RunBlock(block);
      }
    }
  }
  return cudaSuccess;
}

}  // namespace emulator

struct CudaStream {};

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorInvalidValue";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {.name = "emulated GPU",
                 .major = 9,
                 .minor = 0,
                 .multiProcessorCount = 4,
                 .totalGlobalMem = size_t{1} << 30};
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaMalloc(void** data, size_t size_bytes) {
  if (size_bytes > size_t{16} << 30) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
  std::memset(*data, 0xff, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t size_bytes, unsigned) {
  return cudaMalloc(data, size_bytes);
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind) {
  std::memcpy(to, from, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, size_bytes, kind);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size_bytes, cudaStream_t) {
  std::memset(to, value, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CudaStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

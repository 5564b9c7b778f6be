// Runs CUDA kernels that were compiled as C++ on this machine's processor: blocks one after the
// other, a block's threads as fibers that take turns at barriers and warp exchanges.
//
// It finds wrong indices, missing barriers that deadlock, wrong arithmetic, reads of what nobody
// wrote (fresh memory is NaN) and, with memory just large enough, writes past the end.  It does not
// find races: between two barriers threads run one after the other.  A launch in which threads wait
// for each other forever ends the process with a message.
//
// Owned by one thread.  x86-64 only.

#ifndef TESTS_KERNELS_CUDA_EMULATOR_EMULATOR_H_
#define TESTS_KERNELS_CUDA_EMULATOR_EMULATOR_H_

#include <cstdint>
#include <cstring>
#include <functional>

namespace emulator {

// What the running fiber knows of itself.
struct ThreadState {
  dim3 thread_index, block_index, block_dim, grid_dim;
  int32_t index = 0;  // in the block
};
ThreadState& Current();
// threadIdx and its like: read the running fiber's value.
template <dim3 ThreadState::*field, uint32_t dim3::*axis>
struct Index {
  operator uint32_t() const { return Current().*field.*axis; }
};
template <dim3 ThreadState::*field>
struct Indices {
  Index<field, &dim3::x> x;
  Index<field, &dim3::y> y;
  Index<field, &dim3::z> z;
};

inline int32_t Lane() { return Current().index % 32; }

// Runs `thread` once for every thread of the grid.
cudaError_t Run(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

void BlockBarrier();
void WarpBarrier();

// Gives this lane's word to the warp; the words of its 32 lanes (0 of lanes that do not exist) are
// valid until the next exchange but one.
const uint64_t* ShareWord(uint64_t word);
uint32_t Ballot(bool vote);

template <typename T>
T Exchange(T value, int32_t lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  word = ShareWord(word)[lane & 31];
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Gives this lane's value to the warp; all[l] is lane l's.
template <typename T>
void Share(T value, T (&all)[32]) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  const uint64_t* words = ShareWord(word);
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], &words[lane], sizeof(T));
}

}  // namespace emulator

#endif  // TESTS_KERNELS_CUDA_EMULATOR_EMULATOR_H_

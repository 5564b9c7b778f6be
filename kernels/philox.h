// Philox4x32-10, a counter-based random number generator: the same four words for the same
// (counter, key) on every device, with no state.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3.

#ifndef KERNELS_PHILOX_H_
#define KERNELS_PHILOX_H_

#include <cstdint>

#if defined(__CUDACC__)
#define FERRY_HOST_DEVICE __host__ __device__
#else
#define FERRY_HOST_DEVICE
#endif

namespace kernels {

struct PhiloxWords {
  uint32_t words[4];
};

FERRY_HOST_DEVICE inline PhiloxWords Philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53;
  constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
  constexpr uint32_t kWeyl1 = 0xBB67AE85;  // sqrt(3) - 1
  constexpr int kRounds = 10;
  PhiloxWords x = counter;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * x.words[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * x.words[2];
    x = {{static_cast<uint32_t>(product1 >> 32) ^ x.words[1] ^ key0,
          static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ x.words[3] ^ key1,
          static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return x;
}

// The number that decides the token at `position` of branch `branch`: the first word, uniform over
// [0, 2^32).  The 64-bit seed fills Philox's key; branch and position are its counter.
FERRY_HOST_DEVICE inline uint32_t SamplingNumber(uint64_t seed, uint32_t branch,
                                                 uint32_t position) {
  const PhiloxWords counter{{position, branch, 0, 0}};
  return Philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32))
      .words[0];
}

}  // namespace kernels

#endif  // KERNELS_PHILOX_H_

// Equalities that hold for the networks of all families and need no oracle.

#ifndef TESTS_MODEL_NETWORK_EQUALITIES_H_
#define TESTS_MODEL_NETWORK_EQUALITIES_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "tests/model/network_runner.h"
#include "tests/numerics/compare.h"

namespace model {

inline std::vector<int32_t> RandomTokens(int32_t count, int32_t vocab_size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab_size);
  return tokens;
}

// The bytes of the cache and the logits, however many threads compute them.
inline void ExpectThreadsDoNotChangeABit(const std::string& model_dir) {
  NetworkRunner one(model_dir, NetworkRunner::Options(), /*num_threads=*/1);
  NetworkRunner three(model_dir, NetworkRunner::Options(), /*num_threads=*/3);
  const std::vector<int32_t> tokens = RandomTokens(150, one.vocab_size(), 2);
  engine::Sequence a = one.NewSequence(tokens);
  engine::Sequence b = three.NewSequence(tokens);
  EXPECT_TRUE(numerics::BitEqual(three.Run(b, 512, 140), one.Run(a, 512, 140)));
  EXPECT_TRUE(three.CacheBytes(b) == one.CacheBytes(a));
}

// Decoded from the start: what a prompt's rows see, decodes see.
inline void ExpectAbsorbedEqualsUnabsorbed(const std::string& model_dir) {
  NetworkRunner runner(model_dir);
  const std::vector<int32_t> tokens = RandomTokens(200, runner.vocab_size(), 3);
  engine::Sequence ragged = runner.NewSequence(tokens);
  engine::Sequence absorbed = runner.NewSequence(tokens);
  const std::vector<float> expected = runner.Run(ragged, 512);
  const std::vector<float> actual = runner.Run(absorbed, 512, /*absorbed_from=*/8);
  // Same sums in another order; the logits are of order 1.
  EXPECT_TRUE(numerics::AllClose<float>(actual, expected, {.abs = 1e-4}));
}

struct BatchPart {
  int32_t cached, fresh;
  bool absorbed;
};

// A mixed step gives every sequence the bits it gets alone.
inline void ExpectABatchGivesEverySequenceItsOwnBits(NetworkRunner& runner,
                                                     absl::Span<const BatchPart> cases) {
  const int32_t vocab = runner.vocab_size();
  std::vector<engine::Sequence> batch, alone;
  std::vector<float> expected;
  for (size_t i = 0; i < cases.size(); ++i) {
    const BatchPart& one = cases[i];
    const std::vector<int32_t> tokens =
        RandomTokens(one.cached + one.fresh, vocab, static_cast<uint32_t>(10 + i));
    for (auto* list : {&batch, &alone}) {
      list->push_back(runner.NewSequence(tokens));
      engine::Sequence& seq = list->back();
      if (one.cached > 0) {
        const NetworkRunner::Part prefix{&seq, one.cached};
        runner.Step({&prefix, 1});
      }
    }
    const NetworkRunner::Part part{&alone.back(), one.fresh, one.absorbed};
    const std::vector<float> logits = runner.Step({&part, 1});
    expected.insert(expected.end(), logits.begin(), logits.end());
  }
  std::vector<NetworkRunner::Part> parts;
  for (size_t i = 0; i < cases.size(); ++i) {
    parts.push_back({&batch[i], cases[i].fresh, cases[i].absorbed});
  }
  EXPECT_TRUE(numerics::BitEqual(runner.Step(parts), expected));
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(runner.CacheBytes(batch[i]) == runner.CacheBytes(alone[i])) << i;
  }
}

}  // namespace model

#endif  // TESTS_MODEL_NETWORK_EQUALITIES_H_

// RollingNetwork: a model::Network whose "model" is a hash, with a state per sequence.
//
// A state slot holds a digest of every token so far and a ring of words that each token adds one
// word to; cache entries of several groups (of 1, 4 and 128 tokens, with padding) are filled from
// that digest when their last token comes.  A sampled token is a digest of the whole slot and of
// every finished entry that the block table shows.  So a state or a block that is lost, mixed up,
// stale or applied twice changes the text, as does a single byte of an unused slot that shows
// through; and the right text is a plain function of the tokens (RollingReference).
//
// Thread rule as Network.

#ifndef TESTS_FAKES_ROLLING_NETWORK_H_
#define TESTS_FAKES_ROLLING_NETWORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/sequence.h"
#include "model/network.h"

namespace fakes {

struct RollingOptions {
  int32_t vocab_size = 97;
  int32_t max_model_len = 4096;
  int32_t block_size = 128;
  int64_t state_slot_bytes = 1024;  // a multiple of 8, at least 24; 0: the model keeps no state
  int32_t num_penalty_slots = 16;
  uint64_t poison_seed = 0;  // samples of this seed give no token; 0: of none
  model::StepLimits limits;
};

std::unique_ptr<model::Network> CreateRollingNetwork(const RollingOptions& options);

// The network in an engine of its own (engine/executor.h).
std::unique_ptr<engine::Engine> CreateRollingEngine(const RollingOptions& options);

// What a branch emits after `prompt`: until a stop token or max_tokens.
std::vector<int32_t> RollingReference(const RollingOptions& options,
                                      const std::vector<int32_t>& prompt,
                                      const engine::SamplingOptions& sampling, int32_t branch = 0);

}  // namespace fakes

#endif  // TESTS_FAKES_ROLLING_NETWORK_H_

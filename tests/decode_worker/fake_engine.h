// FakeEngine: an engine whose "model" is a hash.  A cache entry is a digest of its token and
// position; a sample is a digest of every entry that the block table shows, of the sampling options
// and of the penalty counts.  So a wrong block, slot, copy, token source or reset changes the text,
// and the right text is a plain function of the tokens (ReferenceTokens).
//
// A step runs as late as it can: in Collect.  A block that is given away while a launched step
// still needs it is therefore caught.

#ifndef TESTS_DECODE_WORKER_FAKE_ENGINE_H_
#define TESTS_DECODE_WORKER_FAKE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/sequence.h"

namespace decode_worker {

struct FakeEngineOptions {
  int32_t vocab_size = 50;
  int32_t max_model_len = 4096;
  int32_t num_penalty_slots = 8;
  uint64_t poison_seed = 0;      // samples of this seed give no token; 0: of none
  uint32_t poison_position = 0;  // from this position on
  model::StepLimits limits;
};

class FakeEngine : public engine::Engine {
 public:
  // Makes every step wait while it is held.
  virtual void Hold() = 0;
  virtual void Go() = 0;
  // The step-th step from now fails in Collect.
  virtual void FailAfter(int32_t steps) = 0;
};
std::unique_ptr<FakeEngine> CreateFakeEngine(const FakeEngineOptions& options);

// What the branch emits after `prompt`: until a stop token or max_tokens.
std::vector<int32_t> ReferenceTokens(const std::vector<int32_t>& prompt,
                                     const engine::SamplingOptions& sampling, int32_t branch,
                                     int32_t vocab_size = 50);

}  // namespace decode_worker

#endif  // TESTS_DECODE_WORKER_FAKE_ENGINE_H_

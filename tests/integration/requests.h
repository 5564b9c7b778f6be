// Prompts, requests and their expected answers for the integration tests.

#ifndef TESTS_INTEGRATION_REQUESTS_H_
#define TESTS_INTEGRATION_REQUESTS_H_

#include <cstdint>
#include <vector>

#include "client/ferry_client.h"
#include "tests/integration/single_engine.h"

namespace integration {

// `length` ordinary token ids, the same for the same salt.
std::vector<int32_t> MakePrompt(int32_t length, uint32_t salt, int32_t vocab_size);

// Sampling of a request: greedy without a seed, else temperature 0.9, top_p 0.95, top_k 50 with it.
struct Ask {
  std::vector<int32_t> prompt;
  int32_t max_tokens = 16;
  uint64_t seed = 0;  // 0: greedy
};
ferry::v1::GenerateRequest ToRequest(const Ask& ask);
std::vector<int32_t> Expected(SingleEngine& oracle, const Ask& ask, uint32_t branch = 0);
std::vector<int32_t> Tokens(const ferry::Client::Completion& completion);

}  // namespace integration

#endif  // TESTS_INTEGRATION_REQUESTS_H_

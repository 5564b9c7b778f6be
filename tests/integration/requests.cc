#include "tests/integration/requests.h"

#include <random>

namespace integration {

std::vector<int32_t> MakePrompt(int32_t length, uint32_t salt, int32_t vocab_size) {
  constexpr int32_t kFirstOrdinary = 16;  // below: special tokens of the test checkpoints
  std::mt19937 random(salt);
  std::vector<int32_t> ids(length);
  for (int32_t& id : ids) {
    id = kFirstOrdinary + static_cast<int32_t>(random() % (vocab_size - kFirstOrdinary));
  }
  return ids;
}

ferry::v1::GenerateRequest ToRequest(const Ask& ask) {
  ferry::v1::GenerateRequest request;
  for (const int32_t id : ask.prompt) request.mutable_tokens()->add_ids(static_cast<uint32_t>(id));
  ferry::v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_max_tokens(static_cast<uint32_t>(ask.max_tokens));
  sampling.set_ignore_eos(true);
  sampling.set_temperature(ask.seed == 0 ? 0.0f : 0.9f);
  if (ask.seed != 0) {
    sampling.set_seed(ask.seed);
    sampling.set_top_p(0.95f);
    sampling.set_top_k(50);
  }
  return request;
}

std::vector<int32_t> Expected(SingleEngine& oracle, const Ask& ask, uint32_t branch) {
  engine::SamplingOptions sampling;
  sampling.branch = branch;
  sampling.max_tokens = ask.max_tokens;
  sampling.temperature = ask.seed == 0 ? 0.0f : 0.9f;
  if (ask.seed != 0) {
    sampling.seed = ask.seed;
    sampling.top_p = 0.95f;
    sampling.top_k = 50;
  }
  return oracle.Generate(ask.prompt, sampling);
}

std::vector<int32_t> Tokens(const ferry::Client::Completion& completion) {
  return {completion.token_ids.begin(), completion.token_ids.end()};
}

}  // namespace integration

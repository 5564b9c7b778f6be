#include "worker/request_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ferry/v1/worker.pb.h"

namespace worker {
namespace {

using ferry::v1::RequestSpec;
using ::testing::HasSubstr;

constexpr int32_t kVocab = 100;

RequestLimits Limits() {
  return {.model = "m",
          .vocab_size = kVocab,
          .max_model_len = 512,
          .block_size = 64,
          .usable_blocks = 4};
}

RequestSpec Good() {
  RequestSpec spec;
  spec.mutable_key()->set_request_id("r");
  spec.mutable_key()->set_attempt(1);
  spec.set_model("m");
  for (uint32_t id : {0u, 5u, 99u}) spec.add_token_ids(id);
  spec.set_num_prompt_tokens(3);
  auto* sampling = spec.mutable_sampling();
  sampling->set_top_p(1);
  sampling->set_repetition_penalty(1);
  sampling->set_max_tokens(1);
  sampling->set_n(1);
  sampling->set_num_logprobs(-1);
  return spec;
}

TEST(RequestSpecTest, AGoodOnePasses) { EXPECT_TRUE(CheckRequestSpec(Good(), Limits()).ok()); }

TEST(RequestSpecTest, AFullPoolOfTokensPassesAndOneMoreDoesNot) {
  RequestSpec spec = Good();
  while (spec.token_ids_size() < 256) spec.add_token_ids(1);
  EXPECT_TRUE(CheckRequestSpec(spec, Limits()).ok());
  spec.add_token_ids(1);
  const absl::Status status = CheckRequestSpec(spec, Limits());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "prompt of 257 tokens needs 5 cache blocks, this worker has 4");
}

TEST(RequestSpecTest, BadInputHasAStatusAndASentence) {
  struct Case {
    void (*change)(RequestSpec&);
    absl::StatusCode code;
    const char* message;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const Case cases[] = {
      {[](auto& s) { s.mutable_key()->clear_request_id(); }, kInvalid, "request_id is empty"},
      {[](auto& s) { s.mutable_key()->set_request_id(std::string(161, 'x')); }, kInvalid,
       "request_id has 161 bytes"},
      {[](auto& s) { s.mutable_key()->set_attempt(0); }, kInvalid, "attempt is 0"},
      {[](auto& s) { s.set_model("x"); }, absl::StatusCode::kNotFound, "model \"x\""},
      {[](auto& s) { s.clear_token_ids(); }, kInvalid, "prompt has no tokens"},
      {[](auto& s) { s.set_num_prompt_tokens(4); }, kInvalid, "num_prompt_tokens is 4 of 3"},
      {[](auto& s) { s.set_num_prompt_tokens(0); }, kInvalid, "num_prompt_tokens is 0"},
      {[](auto& s) { s.set_token_ids(1, kVocab); }, kInvalid, "token id 100 at position 1"},
      {[](auto& s) { s.set_token_ids(2, 0xffffffff); }, kInvalid, "token id 4294967295"},
      {[](auto& s) {
         while (s.token_ids_size() < 512) s.add_token_ids(1);
       },
       kInvalid, "prompt of 512 tokens leaves no room in a context of 512"},
      {[](auto& s) { s.mutable_sampling()->set_temperature(-1); }, kInvalid, "temperature is -1"},
      {[](auto& s) { s.mutable_sampling()->set_temperature(NAN); }, kInvalid, "temperature is nan"},
      {[](auto& s) { s.mutable_sampling()->set_top_k(-1); }, kInvalid, "top_k is -1"},
      {[](auto& s) { s.mutable_sampling()->set_top_p(0); }, kInvalid, "top_p is 0"},
      {[](auto& s) { s.mutable_sampling()->set_min_p(2); }, kInvalid, "min_p is 2"},
      {[](auto& s) { s.mutable_sampling()->set_repetition_penalty(0); }, kInvalid, "repetition"},
      {[](auto& s) { s.mutable_sampling()->set_presence_penalty(NAN); }, kInvalid, "presence"},
      {[](auto& s) { s.mutable_sampling()->set_frequency_penalty(NAN); }, kInvalid, "frequency"},
      {[](auto& s) { s.mutable_sampling()->set_max_tokens(0); }, kInvalid, "max_tokens is 0"},
      {[](auto& s) { s.mutable_sampling()->set_n(17); }, kInvalid, "n is 17, not 1 to 16"},
      {[](auto& s) { s.mutable_sampling()->set_num_logprobs(21); }, kInvalid, "num_logprobs is 21"},
      {[](auto& s) { s.mutable_sampling()->add_stop_token_ids(100); }, kInvalid,
       "stop token id 100"},
      {[](auto& s) {
         for (int i = 0; i < 73; ++i) s.mutable_sampling()->add_stop_token_ids(1);
       },
       kInvalid, "stop_token_ids has 73 ids"},
  };
  for (const Case& c : cases) {
    RequestSpec spec = Good();
    c.change(spec);
    const absl::Status status = CheckRequestSpec(spec, Limits());
    EXPECT_EQ(status.code(), c.code) << c.message << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
}

TEST(RequestSpecTest, ATokenIsLeftToBeSaid) {
  RequestSpec spec = Good();
  spec.mutable_sampling()->set_min_tokens(1);
  for (int i = 0; i < spec.token_ids_size(); ++i) spec.set_token_ids(i, 0);
  for (const uint32_t id : {0, 1, 1, 2}) spec.mutable_sampling()->add_stop_token_ids(id);
  RequestLimits limits = Limits();
  limits.vocab_size = 4;
  EXPECT_TRUE(CheckRequestSpec(spec, limits).ok());
  limits.vocab_size = 3;
  EXPECT_EQ(CheckRequestSpec(spec, limits).message(),
            "sampling.min_tokens is 1 and each of the 3 tokens of the vocabulary is a stop token");
  spec.mutable_sampling()->set_min_tokens(0);
  EXPECT_TRUE(CheckRequestSpec(spec, limits).ok());
}

TEST(RequestSpecTest, SamplingIsCarriedOverWhole) {
  RequestSpec spec = Good();
  auto* s = spec.mutable_sampling();
  s->set_temperature(0.5f);
  s->set_top_k(3);
  s->set_seed(uint64_t{1} << 60);
  s->set_min_tokens(2);
  s->add_stop_token_ids(7);
  s->set_frequency_penalty(0.25f);
  const engine::SamplingOptions options = ToSamplingOptions(*s, 4);
  EXPECT_EQ(options.temperature, 0.5f);
  EXPECT_EQ(options.top_k, 3);
  EXPECT_EQ(options.seed, uint64_t{1} << 60);
  EXPECT_EQ(options.branch, 4u);
  EXPECT_EQ(options.min_tokens, 2);
  EXPECT_THAT(options.stop_token_ids, testing::ElementsAre(7));
  EXPECT_TRUE(options.HasPenalties());
  EXPECT_EQ(options.num_logprobs, -1);
}

}  // namespace
}  // namespace worker

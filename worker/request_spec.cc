#include "worker/request_spec.h"

#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "ferry/v1/worker.pb.h"
#include "kernels/head_and_sample.h"
#include "status/status_macros.h"

namespace worker {
namespace {

// Longer than any that the router makes of a client's.
constexpr size_t kMaxRequestIdBytes = 160;

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

template <typename T>
absl::Status OutOfRange(const char* field, T value, const char* range) {
  return Invalid(absl::StrCat("sampling.", field, " is ", value, ", not ", range));
}

// The router has checked what users say; this guards the engine against anybody else.
absl::Status CheckSampling(const ferry::v1::ResolvedSampling& s, int32_t vocab_size) {
  if (!(s.temperature() >= 0) || std::isinf(s.temperature())) {
    return OutOfRange("temperature", s.temperature(), "finite and >= 0");
  }
  if (s.top_k() < 0) return OutOfRange("top_k", s.top_k(), ">= 0");
  if (!(s.top_p() > 0 && s.top_p() <= 1)) return OutOfRange("top_p", s.top_p(), "in (0, 1]");
  if (!(s.min_p() >= 0 && s.min_p() <= 1)) return OutOfRange("min_p", s.min_p(), "in [0, 1]");
  if (!(s.repetition_penalty() > 0) || std::isinf(s.repetition_penalty())) {
    return OutOfRange("repetition_penalty", s.repetition_penalty(), "finite and > 0");
  }
  if (!std::isfinite(s.presence_penalty())) {
    return OutOfRange("presence_penalty", s.presence_penalty(), "finite");
  }
  if (!std::isfinite(s.frequency_penalty())) {
    return OutOfRange("frequency_penalty", s.frequency_penalty(), "finite");
  }
  if (s.max_tokens() < 1) return OutOfRange("max_tokens", s.max_tokens(), ">= 1");
  if (s.n() < 1 || s.n() > kMaxBranches) {
    return OutOfRange("n", s.n(), absl::StrCat("1 to ", kMaxBranches).c_str());
  }
  if (s.num_logprobs() < -1 || s.num_logprobs() > kernels::kMaxLogprobs) {
    return OutOfRange("num_logprobs", s.num_logprobs(),
                      absl::StrCat("-1 to ", kernels::kMaxLogprobs).c_str());
  }
  if (s.stop_token_ids_size() > kernels::kMaxBannedTokens) {
    return Invalid(absl::StrCat("sampling.stop_token_ids has ", s.stop_token_ids_size(),
                                " ids, at most ", kernels::kMaxBannedTokens));
  }
  for (const uint32_t id : s.stop_token_ids()) {
    if (id >= static_cast<uint32_t>(vocab_size)) {
      return Invalid(
          absl::StrCat("stop token id ", id, " is not below the vocabulary's ", vocab_size));
    }
  }
  const std::set<uint32_t> stop_ids(s.stop_token_ids().begin(), s.stop_token_ids().end());
  if (s.min_tokens() > 0 && stop_ids.size() == static_cast<size_t>(vocab_size)) {
    return Invalid(absl::StrCat("sampling.min_tokens is ", s.min_tokens(), " and each of the ",
                                vocab_size, " tokens of the vocabulary is a stop token"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRequestSpec(const ferry::v1::RequestSpec& spec, const RequestLimits& limits) {
  if (spec.key().request_id().empty()) return Invalid("request_id is empty");
  if (spec.key().request_id().size() > kMaxRequestIdBytes) {
    return Invalid(absl::StrCat("request_id has ", spec.key().request_id().size(),
                                " bytes, at most ", kMaxRequestIdBytes));
  }
  if (spec.key().attempt() == 0) return Invalid("attempt is 0; attempts count from 1");
  if (spec.model() != limits.model) {
    return absl::NotFoundError(absl::StrCat("model \"", spec.model(),
                                            "\" is not served here, but \"", limits.model, "\""));
  }
  const int64_t num_tokens = spec.token_ids_size();
  if (num_tokens == 0) return Invalid("prompt has no tokens");
  if (spec.num_prompt_tokens() < 1 || spec.num_prompt_tokens() > num_tokens) {
    return Invalid(absl::StrCat("num_prompt_tokens is ", spec.num_prompt_tokens(), " of ",
                                num_tokens, " tokens"));
  }
  // One token more is sampled after the prompt.
  if (num_tokens >= limits.max_model_len) {
    return Invalid(absl::StrCat("prompt of ", num_tokens, " tokens leaves no room in a context of ",
                                limits.max_model_len));
  }
  const int64_t blocks = engine::BlocksFor(num_tokens, limits.block_size);
  if (blocks > limits.usable_blocks) {
    return Invalid(absl::StrCat("prompt of ", num_tokens, " tokens needs ", blocks,
                                " cache blocks, this worker has ", limits.usable_blocks));
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    const uint32_t id = spec.token_ids(static_cast<int>(i));
    if (id >= static_cast<uint32_t>(limits.vocab_size)) {
      return Invalid(absl::StrCat("token id ", id, " at position ", i,
                                  " is not below the vocabulary's ", limits.vocab_size));
    }
  }
  return CheckSampling(spec.sampling(), limits.vocab_size);
}

engine::SamplingOptions ToSamplingOptions(const ferry::v1::ResolvedSampling& sampling,
                                          uint32_t branch) {
  engine::SamplingOptions options;
  options.temperature = sampling.temperature();
  options.top_k = sampling.top_k();
  options.top_p = sampling.top_p();
  options.min_p = sampling.min_p();
  options.repetition_penalty = sampling.repetition_penalty();
  options.presence_penalty = sampling.presence_penalty();
  options.frequency_penalty = sampling.frequency_penalty();
  options.seed = sampling.seed();
  options.branch = branch;
  options.max_tokens = static_cast<int32_t>(sampling.max_tokens());
  options.min_tokens = static_cast<int32_t>(sampling.min_tokens());
  options.stop_token_ids.assign(sampling.stop_token_ids().begin(), sampling.stop_token_ids().end());
  options.num_logprobs = sampling.num_logprobs();
  return options;
}

}  // namespace worker

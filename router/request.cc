#include "router/request.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ferry/v1/inference.pb.h"
#include "ferry/v1/worker.pb.h"
#include "status/status_macros.h"

namespace router {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::SamplingParams;

constexpr int32_t kMaxPriority = 100;
constexpr int kMaxStops = 16;
constexpr size_t kMaxStopBytes = 4096;  // each branch keeps its own tables of them
constexpr size_t kMaxCacheSaltBytes = 4096;
constexpr int kMaxStopIds = 64;
// Added and special tokens may swallow white space beside them: a margin on "no text is longer".
constexpr size_t kTextLengthMargin = 4;

template <typename Value>
absl::Status BadField(const char* field, const Value& value, const char* rule) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ": must be ", rule));
}

absl::Status CheckRange(const char* field, float value, bool ok, const char* rule) {
  if (std::isfinite(value) && ok) return absl::OkStatus();
  return BadField(field, value, rule);
}

absl::Status CheckSampling(const SamplingParams& s, const ModelAssets& model) {
  RETURN_IF_ERROR(CheckRange("sampling.temperature", s.temperature(),
                             !s.has_temperature() || s.temperature() >= 0, "a finite number >= 0"));
  if (s.has_top_k() && s.top_k() < -1) {
    return BadField("sampling.top_k", s.top_k(), ">= 1, or 0 or -1 for all");
  }
  RETURN_IF_ERROR(CheckRange("sampling.top_p", s.top_p(),
                             !s.has_top_p() || (s.top_p() > 0 && s.top_p() <= 1), "in (0, 1]"));
  RETURN_IF_ERROR(CheckRange("sampling.min_p", s.min_p(),
                             !s.has_min_p() || (s.min_p() >= 0 && s.min_p() <= 1), "in [0, 1]"));
  RETURN_IF_ERROR(CheckRange("sampling.repetition_penalty", s.repetition_penalty(),
                             !s.has_repetition_penalty() || s.repetition_penalty() > 0,
                             "a finite number > 0"));
  RETURN_IF_ERROR(CheckRange("sampling.presence_penalty", s.presence_penalty(),
                             std::abs(s.presence_penalty()) <= 2, "in [-2, 2]"));
  RETURN_IF_ERROR(CheckRange("sampling.frequency_penalty", s.frequency_penalty(),
                             std::abs(s.frequency_penalty()) <= 2, "in [-2, 2]"));
  if (s.has_max_tokens() && s.max_tokens() == 0) {
    return BadField("sampling.max_tokens", s.max_tokens(), ">= 1");
  }
  if (s.has_max_tokens() && s.min_tokens() > s.max_tokens()) {
    return BadField("sampling.min_tokens", s.min_tokens(),
                    absl::StrCat("<= max_tokens, ", s.max_tokens()).c_str());
  }
  if (s.has_n() && (s.n() == 0 || s.n() > kMaxBranches)) {
    return BadField("sampling.n", s.n(), "in 1..16");
  }
  if (s.has_logprobs() && s.logprobs() > kMaxLogprobs) {
    return BadField("sampling.logprobs", s.logprobs(), "in 0..20");
  }
  if (s.stop_size() > kMaxStops) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.stop has ", s.stop_size(), " strings: at most ", kMaxStops));
  }
  for (int i = 0; i < s.stop_size(); ++i) {
    if (s.stop(i).empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sampling.stop[", i, "] is empty: a stop string has at least one character"));
    }
    if (s.stop(i).size() > kMaxStopBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sampling.stop[", i, "] has ", s.stop(i).size(), " bytes: at most ", kMaxStopBytes));
    }
  }
  if (s.stop_size() > 0 && model.tokenizer == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.stop is set, but model ", model.name, " has no tokenizer"));
  }
  if (s.stop_token_ids_size() > kMaxStopIds) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling.stop_token_ids has ", s.stop_token_ids_size(), " ids: at most ", kMaxStopIds));
  }
  for (int i = 0; i < s.stop_token_ids_size(); ++i) {
    if (s.stop_token_ids(i) >= static_cast<uint32_t>(model.vocab_size)) {
      return absl::InvalidArgumentError(
          absl::StrCat("sampling.stop_token_ids[", i, "] is ", s.stop_token_ids(i),
                       ": must be below the vocabulary size, ", model.vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPrompt(const GenerateRequest& request, const ModelAssets& model) {
  const size_t context = size_t{1} + model.lengths().prompt();
  switch (request.prompt_case()) {
    case GenerateRequest::kText:
      if (model.tokenizer == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat(
            "prompt text is given, but model ", model.name, " has no tokenizer: send token ids"));
      }
      if (request.text().empty()) return absl::InvalidArgumentError("prompt text is empty");
      if (model.longest_token_bytes > 0 &&
          request.text().size() > context * model.longest_token_bytes * kTextLengthMargin) {
        return absl::InvalidArgumentError(absl::StrCat("prompt text has ", request.text().size(),
                                                       " bytes: more than the context of ", context,
                                                       " tokens can hold"));
      }
      return absl::OkStatus();
    case GenerateRequest::kTokens: {
      const auto& ids = request.tokens().ids();
      if (ids.empty()) return absl::InvalidArgumentError("prompt tokens.ids is empty");
      for (int i = 0; i < ids.size(); ++i) {
        if (ids[i] >= static_cast<uint32_t>(model.vocab_size)) {
          return absl::InvalidArgumentError(absl::StrCat("prompt tokens.ids[", i, "] is ", ids[i],
                                                         ": must be below the vocabulary size, ",
                                                         model.vocab_size));
        }
      }
      return absl::OkStatus();
    }
    case GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("prompt is missing: set text or tokens");
}

// The prompt leaves room for at least one token, and for all that the user asked for.
absl::StatusOr<int32_t> OutputTokens(int64_t prompt_tokens, const SamplingParams& sampling,
                                     const ModelAssets& model) {
  const LengthLimits lengths = model.lengths();
  if (prompt_tokens > lengths.prompt()) return PromptTooLong(prompt_tokens, lengths);
  const int64_t context = lengths.TotalFor(prompt_tokens);
  if (prompt_tokens + int64_t{sampling.min_tokens()} > context) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.min_tokens is ", sampling.min_tokens(), ": with a prompt of ",
                     prompt_tokens, " tokens the context of ", context, " is passed"));
  }
  if (!sampling.has_max_tokens()) return static_cast<int32_t>(context - prompt_tokens);
  if (prompt_tokens + sampling.max_tokens() > context) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.max_tokens is ", sampling.max_tokens(), ": with a prompt of ",
                     prompt_tokens, " tokens the context of ", context, " is passed"));
  }
  return static_cast<int32_t>(sampling.max_tokens());
}

uint64_t DrawSeed() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

std::string DrawHex(size_t num_bytes) {
  std::string raw(num_bytes, '\0');
  std::random_device random;
  for (char& byte : raw) byte = static_cast<char>(random());
  return absl::BytesToHexString(raw);
}

void ResolveSampling(const SamplingParams& s, const ModelAssets& model, int32_t max_tokens,
                     const std::vector<int32_t>& stop_ids, ferry::v1::ResolvedSampling* out) {
  const SamplingDefaults& defaults = model.defaults;
  out->set_temperature(s.has_temperature() ? s.temperature() : defaults.temperature.value_or(1));
  out->set_top_k(std::max(0, s.has_top_k() ? s.top_k() : defaults.top_k.value_or(0)));
  out->set_top_p(s.has_top_p() ? s.top_p() : defaults.top_p.value_or(1));
  out->set_min_p(s.min_p());
  out->set_repetition_penalty(s.has_repetition_penalty() ? s.repetition_penalty()
                                                         : defaults.repetition_penalty.value_or(1));
  out->set_presence_penalty(s.presence_penalty());
  out->set_frequency_penalty(s.frequency_penalty());
  out->set_seed(s.has_seed() ? s.seed() : DrawSeed());
  out->set_max_tokens(max_tokens);
  out->set_min_tokens(s.min_tokens());
  for (const int32_t id : stop_ids) out->add_stop_token_ids(id);
  out->set_n(s.has_n() ? s.n() : 1);
  out->set_num_logprobs(s.has_logprobs() ? static_cast<int32_t>(s.logprobs()) : -1);
}

}  // namespace

absl::Status PromptTooLong(int64_t prompt_tokens, const LengthLimits& lengths) {
  return absl::InvalidArgumentError(
      absl::StrCat("prompt has ", prompt_tokens, " tokens: the context is ",
                   int64_t{1} + lengths.prompt(), ", and at least one token must fit behind it"));
}

std::string NewRequestId() { return DrawHex(16); }

PreparedRequest::PreparedRequest() = default;
PreparedRequest::PreparedRequest(PreparedRequest&&) noexcept = default;
PreparedRequest& PreparedRequest::operator=(PreparedRequest&&) noexcept = default;
PreparedRequest::~PreparedRequest() = default;

int32_t PreparedRequest::num_prompt_tokens() const {
  return static_cast<int32_t>(spec->num_prompt_tokens());
}

RequestView PreparedRequest::view() const {
  const auto known = static_cast<int32_t>(tokens.size());
  const ferry::v1::ResolvedSampling& sampling = spec->sampling();
  const int32_t output = known - num_prompt_tokens();
  const int32_t to_come = static_cast<int32_t>(sampling.max_tokens()) - output;
  const int32_t at_least = std::max(1, static_cast<int32_t>(sampling.min_tokens()) - output);
  return {.prompt_tokens = known,
          .max_tokens = to_come,
          .total_tokens = known + (max_tokens_stated ? to_come : at_least),
          .branches = static_cast<int32_t>(spec->sampling().n())};
}

ServedModels::ServedModels(std::vector<std::unique_ptr<ModelAssets>> models)
    : models_(std::move(models)) {}

std::vector<std::string> ServedModels::names() const {
  std::vector<std::string> names;
  for (const auto& model : models_) names.push_back(model->name);
  return names;
}

absl::StatusOr<const ModelAssets*> ServedModels::Find(const std::string& name) const {
  if (name.empty() && models_.size() == 1) return models_.front().get();
  for (const auto& model : models_) {
    if (model->name == name) return model.get();
  }
  const std::string served = absl::StrJoin(names(), ", ");
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model is empty: this router serves several: ", served));
  }
  return absl::NotFoundError(absl::StrCat("model \"", absl::CHexEscape(name.substr(0, 200)),
                                          "\" is not served here; served: ", served));
}

absl::Status CheckName(const char* field, const std::string& name, size_t max_bytes) {
  if (name.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", name.size(), " characters: at most ", max_bytes));
  }
  for (const char c : name) {
    if (c <= 0x20 || c >= 0x7f) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " \"", absl::CHexEscape(name),
                       "\" has a character that is not printable ASCII, or a space"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckParameters(const GenerateRequest& request, const ServedModels& models) {
  ASSIGN_OR_RETURN(const ModelAssets* model, models.Find(request.model()));
  RETURN_IF_ERROR(CheckName("request_id", request.request_id()));
  RETURN_IF_ERROR(CheckName("tenant", request.tenant()));
  if (std::abs(int64_t{request.priority()}) > kMaxPriority) {
    return BadField("priority", request.priority(), "in [-100, 100]");
  }
  if (request.cache_salt().size() > kMaxCacheSaltBytes) {
    return absl::InvalidArgumentError(absl::StrCat("cache_salt has ", request.cache_salt().size(),
                                                   " bytes: at most ", kMaxCacheSaltBytes));
  }
  return CheckSampling(request.sampling(), *model);
}

absl::Status CheckRequest(const GenerateRequest& request, const ServedModels& models) {
  RETURN_IF_ERROR(CheckParameters(request, models));
  ASSIGN_OR_RETURN(const ModelAssets* model, models.Find(request.model()));
  return CheckPrompt(request, *model);
}

absl::StatusOr<PreparedRequest> PrepareRequest(const GenerateRequest& request,
                                               const ServedModels& models,
                                               const TextRules& text_rules) {
  PreparedRequest prepared;
  ASSIGN_OR_RETURN(prepared.model, models.Find(request.model()));
  const ModelAssets& model = *prepared.model;
  if (request.prompt_case() == GenerateRequest::kText) {
    ASSIGN_OR_RETURN(prepared.tokens,
                     model.tokenizer->Encode(request.text(), text_rules.add_special_tokens));
    // The text may name tokens that this checkpoint's embedding does not have.
    for (size_t i = 0; i < prepared.tokens.size(); ++i) {
      if (prepared.tokens[i] < 0 || prepared.tokens[i] >= model.vocab_size) {
        return absl::InvalidArgumentError(
            absl::StrCat("prompt text gives token id ", prepared.tokens[i], " at position ", i,
                         ": the model's vocabulary has ", model.vocab_size));
      }
    }
  } else {
    prepared.tokens.assign(request.tokens().ids().begin(), request.tokens().ids().end());
  }
  if (prepared.tokens.empty()) return absl::InvalidArgumentError("prompt has no tokens");

  const SamplingParams& sampling = request.sampling();
  ASSIGN_OR_RETURN(const int32_t max_tokens, OutputTokens(prepared.tokens.size(), sampling, model));
  const bool is_named = !request.request_id().empty();
  prepared.request_id = is_named ? request.request_id() : NewRequestId();
  prepared.max_tokens_stated = sampling.has_max_tokens();
  prepared.stops.assign(sampling.stop().begin(), sampling.stop().end());
  prepared.include_stop = sampling.include_stop();
  std::set<int32_t> stop_ids(sampling.stop_token_ids().begin(), sampling.stop_token_ids().end());
  if (!sampling.ignore_eos()) stop_ids.insert(model.eos_ids.begin(), model.eos_ids.end());
  prepared.stop_ids.assign(stop_ids.begin(), stop_ids.end());
  prepared.shown_special_ids = text_rules.shown_special_ids;
  prepared.wants_logprobs = sampling.has_logprobs();
  prepared.priority = request.priority();
  prepared.tenant = request.tenant();
  prepared.max_ttft = absl::Milliseconds(request.max_ttft_ms());

  prepared.spec = std::make_unique<ferry::v1::RequestSpec>();
  ferry::v1::RequestSpec& spec = *prepared.spec;
  // A client may use its name again, for another request or at another router; workers remember
  // names.
  spec.mutable_key()->set_request_id(is_named ? absl::StrCat(prepared.request_id, "#", DrawHex(4))
                                              : prepared.request_id);
  spec.mutable_token_ids()->Reserve(static_cast<int>(prepared.tokens.size()));
  for (const int32_t id : prepared.tokens) spec.add_token_ids(id);
  spec.set_num_prompt_tokens(prepared.tokens.size());
  ResolveSampling(sampling, model, max_tokens, prepared.stop_ids, spec.mutable_sampling());
  prepared.cache_namespace = block_hash::MakeNamespace(model.name, model.tokenizer_hash,
                                                       request.cache_salt(), request.tenant());
  spec.set_cache_namespace(prepared.cache_namespace);
  spec.set_model(model.name);
  spec.set_priority(request.priority());
  prepared.bytes = static_cast<int64_t>(prepared.tokens.size() * 2 * sizeof(int32_t) +
                                        request.cache_salt().size() + 1024);
  return prepared;
}

}  // namespace router

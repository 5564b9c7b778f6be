#include "router/http/sampling_members.h"

#include <limits>

#include "absl/strings/str_cat.h"

namespace router::http {
namespace {

using ferry::v1::SamplingParams;

constexpr int64_t kInt32Min = std::numeric_limits<int32_t>::min();
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

void ReadStops(Members* members, SamplingParams* sampling) {
  if (const Json* const stop = members->Find("stop")) {
    if (*stop == "") {
      members->Fail(BadMember("stop", *stop, "a string of at least one character"));
    } else if (stop->is_string()) {
      sampling->add_stop(stop->get<std::string>());
    } else if (!stop->is_array()) {
      members->Fail(BadMember("stop", *stop, "a string or an array of strings"));
    } else {
      for (size_t i = 0; i < stop->size(); ++i) {
        const Json& one = (*stop)[i];
        if (!one.is_string() || one == "") {
          members->Fail(
              BadMember(absl::StrCat("stop[", i, "]"), one, "a string of at least one character"));
          return;
        }
        sampling->add_stop(one.get<std::string>());
      }
    }
  }
  if (const Json* const ids = members->Find("stop_token_ids")) {
    if (!ids->is_array()) members->Fail(BadMember("stop_token_ids", *ids, "an array of token ids"));
    for (size_t i = 0; ids->is_array() && i < ids->size(); ++i) {
      const Json& id = (*ids)[i];
      if (!IsTokenId(id)) {
        members->Fail(BadMember(absl::StrCat("stop_token_ids[", i, "]"), id, "a token id"));
        return;
      }
      sampling->add_stop_token_ids(id.get<uint32_t>());
    }
  }
}

// A seed is any integer of 64 bits, negative ones included.
void ReadSeed(Members* members, SamplingParams* sampling) {
  const Json* const seed = members->Find("seed");
  if (seed == nullptr) return;
  if (!seed->is_number_integer()) {
    members->Fail(BadMember("seed", *seed, "an integer of 64 bits"));
  } else if (seed->is_number_unsigned()) {
    sampling->set_seed(seed->get<uint64_t>());
  } else {
    sampling->set_seed(static_cast<uint64_t>(seed->get<int64_t>()));
  }
}

void ReadMaxTokens(Members* members, SamplingParams* sampling) {
  const auto newer = members->Integer("max_completion_tokens", 1, kInt32Max);
  const auto older = members->Integer("max_tokens", 1, kInt32Max);
  if (newer.has_value() && older.has_value() && *newer != *older) {
    members->Fail(absl::InvalidArgumentError(absl::StrCat("max_completion_tokens is ", *newer,
                                                          ": must be max_tokens, ", *older,
                                                          ", if both are given")));
  }
  if (const auto max_tokens = newer.has_value() ? newer : older) {
    sampling->set_max_tokens(static_cast<uint32_t>(*max_tokens));
  }
}

void ReadStream(Members* members, ApiRequest* api) {
  api->stream = members->Bool("stream").value_or(false);
  const Json* const options = members->Find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) {
    members->Fail(BadMember("stream_options", *options, "an object"));
    return;
  }
  if (!api->stream) {
    members->Fail(BadMember("stream_options", *options, "absent unless stream is true"));
  }
  Members inner(*options);
  api->include_usage = inner.Bool("include_usage").value_or(false);
  inner.Bool("include_obfuscation");
  if (const absl::Status status = inner.Finish(); !status.ok()) {
    members->Fail(
        absl::InvalidArgumentError(absl::StrCat("stream_options.", std::string(status.message()))));
  }
}

// Strings by name, which nobody here reads.
void ReadMetadata(Members* members) {
  const Json* const metadata = members->Find("metadata");
  if (metadata == nullptr) return;
  if (!metadata->is_object()) {
    members->Fail(BadMember("metadata", *metadata, "an object of strings"));
    return;
  }
  for (const auto& [name, value] : metadata->items()) {
    if (value.is_string()) continue;
    members->Fail(BadMember(absl::StrCat("metadata.", ShownName(name)), value, "a string"));
  }
}

}  // namespace

void ReadCommonMembers(Members* members, ApiRequest* api, ferry::v1::GenerateRequest* request) {
  SamplingParams* const s = request->mutable_sampling();
  if (const auto model = members->String("model")) request->set_model(*model);
  if (const auto salt = members->String("cache_salt")) request->set_cache_salt(*salt);
  if (const auto priority = members->Integer("priority", kInt32Min, kInt32Max)) {
    request->set_priority(static_cast<int32_t>(*priority));
  }
  if (const auto v = members->Number("temperature")) s->set_temperature(*v);
  if (const auto v = members->Number("top_p")) s->set_top_p(*v);
  if (const auto v = members->Number("min_p")) s->set_min_p(*v);
  if (const auto v = members->Number("repetition_penalty")) s->set_repetition_penalty(*v);
  if (const auto v = members->Number("presence_penalty")) s->set_presence_penalty(*v);
  if (const auto v = members->Number("frequency_penalty")) s->set_frequency_penalty(*v);
  if (const auto v = members->Integer("top_k", kInt32Min, kInt32Max)) {
    s->set_top_k(static_cast<int32_t>(*v));
  }
  if (const auto v = members->Integer("min_tokens", 0, kInt32Max)) {
    s->set_min_tokens(static_cast<uint32_t>(*v));
  }
  if (const auto v = members->Integer("n", 1, kMaxBranches)) {
    s->set_n(static_cast<uint32_t>(*v));
    api->branches = static_cast<uint32_t>(*v);
  }
  if (const auto v = members->Bool("ignore_eos")) s->set_ignore_eos(*v);
  if (const auto v = members->Bool("include_stop_str_in_output")) s->set_include_stop(*v);
  ReadSeed(members, s);
  ReadMaxTokens(members, s);
  ReadStops(members, s);
  ReadStream(members, api);
  // What says something about the caller, not about the answer.
  for (const char* const name : {"user", "service_tier", "safety_identifier", "prompt_cache_key",
                                 "prompt_cache_retention"}) {
    members->String(name);
  }
  members->Bool("store");
  ReadMetadata(members);
  members->Expect("logit_bias", Json::object());
  members->Expect("use_beam_search", false);
  members->Expect("skip_special_tokens", true);
  members->Expect("spaces_between_special_tokens", true);
}

}  // namespace router::http

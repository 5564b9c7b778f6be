#include "absl/strings/str_cat.h"
#include "router/http/sampling_members.h"
#include "status/status_macros.h"

namespace router::http {
namespace {

using ferry::v1::GenerateRequest;

constexpr size_t kMaxPrompts = 1024;
constexpr uint32_t kDefaultMaxTokens = 16;  // OpenAI's, of this API alone

absl::Status ReadIds(const std::string& place, const Json& ids, GenerateRequest* request) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!IsTokenId(ids[i]))
      return BadMember(absl::StrCat(place, "[", i, "]"), ids[i], "a token id");
    request->mutable_tokens()->add_ids(ids[i].get<uint32_t>());
  }
  return absl::OkStatus();
}

// A prompt is a text or an array of ids; there may be an array of them.
absl::Status ReadPrompts(const Json& prompt, const GenerateRequest& common, ApiRequest* api) {
  const auto add = [&]() -> GenerateRequest* {
    api->prompts.push_back(std::make_shared<GenerateRequest>(common));
    return api->prompts.back().get();
  };
  if (prompt.is_string()) {
    add()->set_text(prompt.get<std::string>());
    return absl::OkStatus();
  }
  constexpr char kRule[] = "a string, an array of token ids, or an array of such prompts";
  if (!prompt.is_array() || prompt.empty()) return BadMember("prompt", prompt, kRule);
  if (prompt[0].is_number()) return ReadIds("prompt", prompt, add());
  if (prompt.size() > kMaxPrompts) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt is an array of ", prompt.size(), " prompts: at most ", kMaxPrompts));
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    const std::string place = absl::StrCat("prompt[", i, "]");
    if (prompt[i].is_string()) {
      add()->set_text(prompt[i].get<std::string>());
    } else if (prompt[i].is_array() && !prompt[i].empty()) {
      RETURN_IF_ERROR(ReadIds(place, prompt[i], add()));
    } else {
      return BadMember(place, prompt[i], "a string or an array of token ids");
    }
  }
  return absl::OkStatus();
}

}  // namespace

ApiRequest::ApiRequest() = default;
ApiRequest::ApiRequest(ApiRequest&&) noexcept = default;
ApiRequest& ApiRequest::operator=(ApiRequest&&) noexcept = default;
ApiRequest::~ApiRequest() = default;

absl::StatusOr<ApiRequest> ParseCompletionRequest(std::string_view body) {
  ASSIGN_OR_RETURN(const Json object, ParseJsonObject(body));
  ApiRequest api;
  GenerateRequest common;
  Members members(object);
  ReadCommonMembers(&members, &api, &common);
  if (!common.sampling().has_max_tokens()) {
    common.mutable_sampling()->set_max_tokens(kDefaultMaxTokens);
  }
  if (const auto logprobs = members.Integer("logprobs", 0, kMaxLogprobs)) {
    common.mutable_sampling()->set_logprobs(static_cast<uint32_t>(*logprobs));
  }
  members.Expect("best_of", api.branches);
  members.Expect("echo", false);
  members.Expect("suffix", "");
  const Json* const prompt = members.Find("prompt");
  RETURN_IF_ERROR(members.Finish());
  if (prompt == nullptr) return absl::InvalidArgumentError("prompt is missing");
  RETURN_IF_ERROR(ReadPrompts(*prompt, common, &api));
  return api;
}

}  // namespace router::http

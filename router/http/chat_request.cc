#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "chat/prompt.h"
#include "router/http/sampling_members.h"
#include "status/status_macros.h"

namespace router::http {
namespace {

using ferry::v1::GenerateRequest;

constexpr std::array kEfforts = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};

void ReadLogprobs(Members* members, GenerateRequest* request) {
  const bool logprobs = members->Bool("logprobs").value_or(false);
  const auto top = members->Integer("top_logprobs", 0, kMaxLogprobs);
  if (top.has_value() && !logprobs) {
    members->Fail(BadMember("top_logprobs", *top, "absent unless logprobs is true"));
  }
  if (logprobs) request->mutable_sampling()->set_logprobs(static_cast<uint32_t>(top.value_or(0)));
}

// What a format writes into the prompt is read by chat::ParseConversation; this is what it leaves
// open.
void ReadChoices(Members* members) {
  if (const Json* const choice = members->Find("tool_choice")) {
    if (*choice != "auto" && *choice != "none") {
      members->Fail(BadMember("tool_choice", *choice,
                              "\"auto\" or \"none\": the model cannot be made to call a tool"));
    }
  }
  if (const Json* const effort = members->Find("reasoning_effort")) {
    if (std::none_of(kEfforts.begin(), kEfforts.end(),
                     [&](const char* known) { return *effort == known; })) {
      members->Fail(
          BadMember("reasoning_effort", *effort, "none, minimal, low, medium, high, xhigh or max"));
    }
  }
  for (const char* const name :
       {"messages", "tools", "chat_template_kwargs", "add_generation_prompt"}) {
    members->Find(name);
  }
  members->Expect("verbosity", "medium");
  members->Expect("parallel_tool_calls", true);
  members->Expect("response_format", {{"type", "text"}});
  members->Expect("modalities", Json::array({"text"}));
  members->Expect("functions", Json::array());
}

}  // namespace

absl::StatusOr<ApiRequest> ParseChatRequest(std::string_view body, const ServedModels& models) {
  ASSIGN_OR_RETURN(const Json object, ParseJsonObject(body));
  ApiRequest api;
  api.api = Api::kChat;
  const auto request = std::make_shared<GenerateRequest>();
  Members members(object);
  ReadCommonMembers(&members, &api, request.get());
  ReadLogprobs(&members, request.get());
  ReadChoices(&members);
  RETURN_IF_ERROR(members.Finish());

  ASSIGN_OR_RETURN(const ModelAssets* model, models.Find(request->model()));
  if (!model->chat_format.ok()) {
    // The request is what cannot be served, not the model.  Why is for the log, which has it from
    // the start: it names the router's files and flags.
    return absl::InvalidArgumentError(
        absl::StrCat("model ", model->name, ": chat is not available, only completions are"));
  }
  const chat::Format format = *model->chat_format;
  ASSIGN_OR_RETURN(const chat::Conversation conversation, chat::ParseConversation(object));
  ASSIGN_OR_RETURN(*request->mutable_text(), chat::RenderPrompt(format, conversation));
  // The prompt begins with BOS as text, and the reply is split by tokens that may be special ones.
  api.text.add_special_tokens = false;
  for (const std::string_view marker : chat::ReplyMarkers()) {
    const int32_t id = model->tokenizer->TokenId(marker);
    if (id >= 0) api.text.shown_special_ids.push_back(id);
  }
  const bool has_tools =
      !conversation.tools.empty() ||
      std::any_of(conversation.messages.begin(), conversation.messages.end(),
                  [](const chat::Message& message) { return !message.tools.empty(); });
  api.reply = {.format = format,
               .in_reasoning = chat::ReplyBeginsInReasoning(format, conversation),
               .tools = has_tools};
  api.prompts = {request};
  return api;
}

}  // namespace router::http

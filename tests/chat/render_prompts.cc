// render_prompts: a request in OpenAI's form with a member "format" on each line of standard input,
// a JSON object {"text"} or {"error"} for it on each line of standard output.

#include <iostream>
#include <string>

#include "chat/prompt.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<std::string> Render(const std::string& line) {
  const Json request = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!request.is_object()) return absl::InvalidArgumentError("not a JSON object");
  ASSIGN_OR_RETURN(const chat::Format format,
                   chat::FormatFromName(request.value("format", std::string())));
  ASSIGN_OR_RETURN(const chat::Conversation conversation, chat::ParseConversation(request));
  return chat::RenderPrompt(format, conversation);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const absl::StatusOr<std::string> text = Render(line);
    std::cout << (text.ok() ? Json{{"text", *text}}
                            : Json{{"error", std::string(text.status().message())}})
                     .dump()
              << "\n";
  }
  return 0;
}

#include "cli/tokenize_command.h"

#include <cstdint>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chat/prompt.h"
#include "cli/quote.h"
#include "input_file/input_file.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"
#include "tokenizer/tokenizer.h"

namespace cli {
namespace {

struct Options {
  std::string model_dir;
  std::string text;
  std::string chat_file;
  std::string chat_format;
  bool add_special_tokens = false;
  bool ids_only = false;
};

constexpr int64_t kMaxChatBytes = int64_t{64} << 20;

// The prompt of the chat request in a file.
absl::StatusOr<std::string> ChatPrompt(const Options& options,
                                       const tokenizer::Tokenizer& tokenizer) {
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(options.chat_file, kMaxChatBytes));
  const auto request = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (request.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(options.chat_file, " is not JSON"));
  }
  ASSIGN_OR_RETURN(const chat::Format format, options.chat_format.empty()
                                                  ? chat::FormatOfCheckpoint(options.model_dir)
                                                  : chat::FormatFromName(options.chat_format));
  RETURN_IF_ERROR(chat::CheckVocabulary(format, tokenizer));
  ASSIGN_OR_RETURN(const chat::Conversation conversation, chat::ParseConversation(request));
  return chat::RenderPrompt(format, conversation);
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::Load(options.model_dir));
  std::string text = options.text;
  if (!options.chat_file.empty()) {
    ASSIGN_OR_RETURN(text, ChatPrompt(options, *tokenizer));
  }
  if (options.text == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                   tokenizer->Encode(text, options.add_special_tokens));
  if (options.ids_only) {
    std::cout << absl::StrJoin(ids, " ") << "\n";
    return absl::OkStatus();
  }
  for (const int32_t id : ids) {
    std::cout << id << "\t" << Quote(tokenizer->TokenBytes(id))
              << (tokenizer->IsSpecial(id) ? "\tspecial" : "") << "\n";
  }
  std::cout << ids.size() << " tokens, " << text.size() << " bytes\n";
  return absl::OkStatus();
}

}  // namespace

void AddTokenizeCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("tokenize", "Show the tokens of a text");
  command->add_option("--model", options->model_dir, "Directory that holds tokenizer.json")
      ->required();
  CLI::Option* text =
      command->add_option("text", options->text, "The text, or - for standard input");
  CLI::Option* chat = command->add_option(
      "--chat", options->chat_file,
      "Instead of a text: a JSON file with messages, and tools, as of a chat completion request");
  text->excludes(chat);
  command
      ->add_option("--chat_format", options->chat_format,
                   "v2, v3, r1, v3-0324, r1-0528, v3.1, v3.2 or v4; without it the checkpoint's")
      ->needs(chat);
  command->add_flag("--add_special_tokens", options->add_special_tokens,
                    "Put BOS in front where the checkpoint says so");
  command->add_flag("--ids", options->ids_only, "Print the ids alone, on one line");
  command->callback([options, text, chat, result] {
    *result = text->count() + chat->count() == 0
                  ? absl::InvalidArgumentError("tokenize needs a text, or --chat")
                  : Run(*options);
  });
}

}  // namespace cli

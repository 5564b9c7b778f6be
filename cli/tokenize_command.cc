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
#include "cli/quote.h"
#include "status/status_macros.h"
#include "tokenizer/tokenizer.h"

namespace cli {
namespace {

struct Options {
  std::string model_dir;
  std::string text;
  bool add_special_tokens = false;
  bool ids_only = false;
};

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::Load(options.model_dir));
  std::string text = options.text;
  if (text == "-") {
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
  command->add_option("text", options->text, "The text, or - for standard input")->required();
  command->add_flag("--add_special_tokens", options->add_special_tokens,
                    "Put BOS in front where the checkpoint says so");
  command->add_flag("--ids", options->ids_only, "Print the ids alone, on one line");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

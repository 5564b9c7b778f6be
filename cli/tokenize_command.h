// ferry tokenize: shows how a checkpoint's tokenizer cuts a text.

#ifndef CLI_TOKENIZE_COMMAND_H_
#define CLI_TOKENIZE_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddTokenizeCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_TOKENIZE_COMMAND_H_

// ferry generate: text for one prompt, from a router or from an engine in this process.

#ifndef CLI_GENERATE_COMMAND_H_
#define CLI_GENERATE_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddGenerateCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_GENERATE_COMMAND_H_

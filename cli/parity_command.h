// ferry parity: runs a checkpoint against golden logits.

#ifndef CLI_PARITY_COMMAND_H_
#define CLI_PARITY_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddParityCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_PARITY_COMMAND_H_

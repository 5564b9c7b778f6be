// ferry health: whether a process serves, as an exit code: for probes and scripts.

#ifndef CLI_HEALTH_COMMAND_H_
#define CLI_HEALTH_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddHealthCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_HEALTH_COMMAND_H_

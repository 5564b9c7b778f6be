// ferry serve: a whole system on this machine, until it is told to stop.

#ifndef CLI_SERVE_COMMAND_H_
#define CLI_SERVE_COMMAND_H_

#include "absl/status/status.h"
#include "cli/local_system.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddServeCommand(CLI::App& app, absl::Status* result);

// The flags that say what a LocalSystem consists of.
void AddLocalSystemFlags(CLI::App& command, LocalSystemOptions* options);

}  // namespace cli

#endif  // CLI_SERVE_COMMAND_H_

// ferry demo: starts a whole system on this machine, asks it a few things and shows what happened.

#ifndef CLI_DEMO_COMMAND_H_
#define CLI_DEMO_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddDemoCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_DEMO_COMMAND_H_

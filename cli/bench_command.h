// ferry bench: load on a running system, a router or an OpenAI server, and what its users would
// have seen.

#ifndef CLI_BENCH_COMMAND_H_
#define CLI_BENCH_COMMAND_H_

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddBenchCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_BENCH_COMMAND_H_

// ferry inspect: what is in a checkpoint, whether it is complete, and what its cache costs.

#ifndef CLI_INSPECT_COMMAND_H_
#define CLI_INSPECT_COMMAND_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace cli {

// Reads headers only (and norms), however large the checkpoint.
// Errors: what keeps Ferry from serving it, in one sentence.
absl::Status InspectCheckpoint(const std::string& model_dir, std::ostream& out);

// Adds the sub-command; when it is chosen, *result becomes what it returned.
void AddInspectCommand(CLI::App& app, absl::Status* result);

}  // namespace cli

#endif  // CLI_INSPECT_COMMAND_H_

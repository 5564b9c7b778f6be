// ferry: the command-line tool.  Each sub-command is a pair of files, cli/<name>_command.{h,cc}; to
// add one, include its header and add its line to AddCommands.

#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "cli/bench_command.h"
#include "cli/demo_command.h"
#include "cli/generate_command.h"
#include "cli/inspect_command.h"
#include "cli/parity_command.h"
#include "cli/serve_command.h"
#include "cli/tokenize_command.h"

namespace {

void AddCommands(CLI::App& app, absl::Status* result) {
  cli::AddBenchCommand(app, result);
  cli::AddDemoCommand(app, result);
  cli::AddGenerateCommand(app, result);
  cli::AddInspectCommand(app, result);
  cli::AddParityCommand(app, result);
  cli::AddServeCommand(app, result);
  cli::AddTokenizeCommand(app, result);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Serves DeepSeek's MLA models with prefill and decode on different workers."};
  app.name("ferry");
  app.require_subcommand(1);
  absl::Status result;
  AddCommands(app, &result);
  CLI11_PARSE(app, argc, argv);
  if (result.ok()) return 0;
  std::fprintf(stderr, "ferry: %s\n", std::string(result.message()).c_str());
  return 1;
}

// ferry: the command-line tool.  Each sub-command is a pair of files, cli/<name>_command.{h,cc}; to
// add one, include its header and add its line to AddCommands.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "cli/bench_command.h"
#include "cli/demo_command.h"
#include "cli/generate_command.h"
#include "cli/health_command.h"
#include "cli/inspect_command.h"
#include "cli/parity_command.h"
#include "cli/serve_command.h"
#include "cli/tokenize_command.h"
#include "grpc/support/log.h"
#include "service/command_line.h"
#include "service/lock_order.h"
#include "service/process.h"

namespace {

void AddCommands(CLI::App& app, absl::Status* result) {
  cli::AddBenchCommand(app, result);
  cli::AddDemoCommand(app, result);
  cli::AddGenerateCommand(app, result);
  cli::AddHealthCommand(app, result);
  cli::AddInspectCommand(app, result);
  cli::AddParityCommand(app, result);
  cli::AddServeCommand(app, result);
  cli::AddTokenizeCommand(app, result);
}

}  // namespace

int main(int argc, char** argv) {
  service::ForgetLockOrder();
  CLI::App app{"Serves DeepSeek's MLA models with prefill and decode on different workers."};
  app.name("ferry");
  app.require_subcommand(0, 1);  // so that a wrong one is what the error names
  app.set_version_flag("--version", std::string(service::kVersion));
  absl::Status result;
  AddCommands(app, &result);
  // What gRPC would print is in the status of the call, unless somebody asks for more.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) {
    gpr_set_log_function([](gpr_log_func_args*) {});
  }
  app.failure_message(service::UsageError);
  CLI11_PARSE(app, argc, argv);
  if (app.get_subcommands().empty()) {
    std::fputs(app.help().c_str(), stderr);
    return 1;
  }
  if (result.ok() && !std::cout.flush()) {
    result = absl::DataLossError("standard output cannot be written");
  }
  if (result.ok()) return 0;
  std::fprintf(stderr, "ferry: %s\n", std::string(result.message()).c_str());
  return 1;
}

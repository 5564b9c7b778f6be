#include "cli/demo_command.h"

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cli/generation_printer.h"
#include "cli/local_system.h"
#include "cli/serve_command.h"
#include "client/ferry_client.h"
#include "ferry/v1/inference.pb.h"
#include "service/process.h"
#include "status/status_macros.h"

namespace cli {
namespace {

struct Options {
  LocalSystemOptions system;
  std::vector<std::string> prompts;
  uint32_t max_tokens = 64;
  double temperature = 0.7;
  bool verbose = false;
};

constexpr char kOpening[] =
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in "
    "want of a wife. However little known the feelings or views of such a man may be on his first "
    "entering "
    "a neighbourhood, this truth is so well fixed in the minds of the surrounding families, that "
    "he is "
    "considered as the rightful property of some one or other of their daughters.";

// The second begins like the first, so that its beginning is found in the caches.
std::vector<std::string> DefaultPrompts() {
  return {
      kOpening,
      absl::StrCat(kOpening, " \"My dear Mr. Bennet,\" said his lady to him one day, \"have you"),
      "She had nothing to say to him, and"};
}

absl::Status RunPrompt(ferry::Client& client, const LocalSystem& system, const Options& options,
                       const std::string& prompt, uint64_t seed) {
  ferry::v1::GenerateRequest request;
  request.set_model(system.model_name());
  request.set_text(prompt);
  request.mutable_sampling()->set_max_tokens(options.max_tokens);
  request.mutable_sampling()->set_temperature(static_cast<float>(options.temperature));
  request.mutable_sampling()->set_seed(seed);
  std::cout << "\n> " << prompt << "\n" << std::flush;
  GenerationPrinter printer({}, std::cout);
  ferry::v1::GenerateSummary summary;
  bool interrupted = false;
  const absl::Status status =
      client.Generate(request, [&](const ferry::v1::GenerateResponse& response) {
        printer.Add(response);
        if (response.has_summary()) summary = response.summary();
        interrupted = service::WaitForTermination(absl::ZeroDuration()) != 0;
        return !interrupted;
      });
  printer.Finish();
  if (interrupted) return absl::CancelledError("interrupted");
  RETURN_IF_ERROR(status);
  std::cout << DescribeSummary(summary, "  | ", system.names_by_address());
  return absl::OkStatus();
}

absl::Status RunPrompts(const LocalSystem& system, const Options& options) {
  ASSIGN_OR_RETURN(const auto client, ferry::Client::Create(system.client_options()));
  uint64_t seed = 1;
  for (const std::string& prompt : options.prompts.empty() ? DefaultPrompts() : options.prompts) {
    RETURN_IF_ERROR(RunPrompt(*client, system, options, prompt, seed++));
  }
  return absl::OkStatus();
}

absl::Status Run(Options options) {
  service::BlockTerminationSignals();
  if (!options.verbose) {
    options.system.log_path =
        (std::filesystem::temp_directory_path() / absl::StrCat("ferry_demo_", getpid(), ".log"))
            .string();
  }
  // However short a prompt is: here it is to be seen travelling.
  options.system.router_flags.insert(options.system.router_flags.begin(),
                                     "--local_prefill_tokens=0");
  std::cout << "starting a router, " << options.system.num_prefill << " prefill and "
            << options.system.num_decode << " decode workers ..." << std::endl;
  const absl::Time start = absl::Now();
  absl::Status status;
  {
    auto system = LocalSystem::Start(options.system);
    status = system.status();
    if (status.ok()) {
      std::cout << "ready after "
                << absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1)))
                << ":\n";
      for (const auto& [address, name] : (*system)->names_by_address()) {
        std::cout << "  " << name << " at " << address << "\n";
      }
      status = RunPrompts(**system, options);
      std::cout << "\nstopping ..." << std::endl;
      status.Update((*system)->Stop());
    }
  }
  if (status.ok()) {
    std::error_code ignored;
    if (!options.verbose) std::filesystem::remove(options.system.log_path, ignored);
    std::cout << "all processes have ended\n";
    return status;
  }
  if (options.verbose) return status;
  return absl::Status(status.code(), absl::StrCat(std::string(status.message()),
                                                  " (logs: ", options.system.log_path, ")"));
}

}  // namespace

void AddDemoCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  options->system.port = 0;
  options->system.stop_limit = absl::Seconds(30);
  CLI::App* command =
      app.add_subcommand("demo", "Start a system, send it a few prompts and show what happened");
  AddLocalSystemFlags(*command, &options->system);
  command->add_option("--prompt", options->prompts,
                      "Prompts instead of the built-in ones; repeatable");
  command->add_option("--max_tokens", options->max_tokens, "Tokens an answer")
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0: greedy")->capture_default_str();
  command->add_flag("--verbose", options->verbose, "Show the processes' log lines");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

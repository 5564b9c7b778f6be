#include "cli/parity_command.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "cli/parity_runner.h"
#include "service/command_line.h"
#include "status/status_macros.h"

namespace cli {
namespace {

absl::Status Run(const ParityOptions& options) {
  ASSIGN_OR_RETURN(const Verdict verdict, RunParity(options, std::cout));
  if (verdict.failed == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(options.model_dir, " differs from its golden logits in ",
                                          verdict.failed, " of ", verdict.passed + verdict.failed,
                                          " cases"));
}

}  // namespace

void AddParityCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<ParityOptions>();
  CLI::App* command =
      app.add_subcommand("parity", "Compare a checkpoint's logits with golden ones");
  command->add_option("--model", options->model_dir, "Checkpoint directory")->required();
  command->add_option("--golden", options->golden_file,
                      "Golden file (default: golden.safetensors in the directory)");
  std::vector<std::string> names;
  for (const ParityPath path : kParityPaths) names.emplace_back(ParityPathName(path));
  auto chosen = std::make_shared<std::vector<std::string>>();
  command
      ->add_option("--path", *chosen, "How the prompt is computed; may be repeated (default: all)")
      ->check(CLI::IsMember(names))
      ->type_name("")
      ->allow_extra_args(false);
  command->add_option("--device", options->device, "cpu or cuda")->capture_default_str();
  command->add_option("--dtype", options->dtype, "Activations: float32 or bfloat16")
      ->capture_default_str();
  command
      ->add_option("--kv_cache_dtype", options->kv_cache_dtype,
                   "auto, float32, bfloat16 or fp8; auto: as --dtype")
      ->capture_default_str();
  command
      ->add_option("--max_mean_delta", options->max_mean_delta,
                   "Judge by the mean of case means instead of every logit (bf16, fp8)")
      ->check(service::NumberIn(0, 1e9));
  command->callback([options, chosen, result] {
    for (const ParityPath path : kParityPaths) {
      const std::string name(ParityPathName(path));
      if (std::find(chosen->begin(), chosen->end(), name) != chosen->end()) {
        options->paths.push_back(path);
      }
    }
    *result = Run(*options);
  });
}

}  // namespace cli

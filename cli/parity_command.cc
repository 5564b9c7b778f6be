#include "cli/parity_command.h"

#include <iostream>
#include <map>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "cli/parity_runner.h"
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
  std::map<std::string, ParityPath> paths;
  for (const ParityPath path : kParityPaths) paths[std::string(ParityPathName(path))] = path;
  command
      ->add_option("--path", options->paths,
                   "How the prompt is computed: whole, chunked, decode or transfer (default: all)")
      ->transform(CLI::CheckedTransformer(paths).description("PATH"));
  command->add_option("--device", options->device, "cpu or cuda")->capture_default_str();
  command->add_option("--dtype", options->dtype, "Activations: float32 or bfloat16")
      ->capture_default_str();
  command
      ->add_option("--kv_cache_dtype", options->kv_cache_dtype,
                   "auto, float32, bfloat16 or fp8; auto: as --dtype")
      ->capture_default_str();
  command->add_option("--max_mean_delta", options->max_mean_delta,
                      "Judge by the mean of case means instead of every logit (bf16, fp8)");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

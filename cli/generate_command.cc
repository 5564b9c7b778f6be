#include "cli/generate_command.h"

#include <cstdint>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "cli/generation_printer.h"
#include "cli/local_generation.h"
#include "cli/router_flags.h"
#include "cli/sampling_flags.h"
#include "client/ferry_client.h"
#include "engine/engine.h"
#include "ferry/v1/inference.pb.h"
#include "status/status_macros.h"

namespace cli {
namespace {

struct Options {
  ferry::ClientOptions client;  // with an address: through a router
  std::string model;  // a served model's name, or without an address a checkpoint directory
  engine::EngineOptions engine;  // without an address
  std::optional<std::string> prompt;
  std::vector<uint32_t> prompt_ids;
  ferry::v1::GenerateRequest request;
  bool print_ids = false;
  bool quiet = false;
};

absl::Status Run(Options& options) {
  ferry::v1::GenerateRequest& request = options.request;
  if (options.client.address.empty() && options.model.empty()) {
    return absl::InvalidArgumentError(
        "need --address of a router or --model, a checkpoint directory");
  }
  if (!options.prompt.has_value() && options.prompt_ids.empty()) {
    return absl::InvalidArgumentError(
        "no prompt: give --prompt, a text or - for standard input, or --prompt_ids");
  }
  if (options.prompt.has_value()) {
    if (options.prompt == "-") {
      options.prompt->assign(std::istreambuf_iterator<char>(std::cin),
                             std::istreambuf_iterator<char>());
    }
    request.set_text(*options.prompt);
  } else {
    request.mutable_tokens()->mutable_ids()->Add(options.prompt_ids.begin(),
                                                 options.prompt_ids.end());
  }
  const ferry::v1::SamplingParams& sampling = request.sampling();
  GenerationPrinter printer({.num_branches = sampling.has_n() ? sampling.n() : 1,
                             .print_ids = options.print_ids,
                             .print_logprobs = sampling.has_logprobs()},
                            std::cout);
  ferry::v1::GenerateSummary summary;
  const auto on_message = [&](const ferry::v1::GenerateResponse& response) {
    printer.Add(response);
    if (response.has_summary()) summary = response.summary();
    return true;
  };
  absl::Status status;
  if (options.client.address.empty()) {
    options.engine.model_dir = options.model;
    status = GenerateLocally(options.engine, request, on_message);
  } else {
    request.set_model(options.model);
    ASSIGN_OR_RETURN(const auto client, ferry::Client::Create(options.client));
    status = ExplainConnection(client->Generate(request, on_message), options.client);
  }
  printer.Finish();
  RETURN_IF_ERROR(status);
  if (!options.quiet) std::cerr << DescribeSummary(summary, "");
  return absl::OkStatus();
}

}  // namespace

void AddGenerateCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "Generate text for one prompt");
  ferry::v1::GenerateRequest& request = options->request;
  const auto add = [command](const char* flag, auto& field, const char* help) {
    return command->add_option(flag, field, help);
  };
  AddAddressFlag(*command, "host:port of a router; without it an engine runs in this process",
                 &options->client);
  add("--model", options->model, "A served model's name; without --address a checkpoint directory");
  AddTlsFlags(*command, &options->client);
  engine::EngineOptions& engine = options->engine;
  const char* kInProcess = "In this process";
  add("--device", engine.device, "cpu or cuda")->group(kInProcess);
  add("--dtype", engine.dtype, "Activations: auto, float32 or bfloat16")->group(kInProcess);
  add("--kv_cache_dtype", engine.kv_cache_dtype, "Cache: auto, float32, bfloat16 or fp8")
      ->group(kInProcess);
  add("--num_threads", engine.num_threads, "CPU threads; 0: all cores")->group(kInProcess);
  add("--max_model_len", engine.max_model_len, "Tokens; 0: the checkpoint's")->group(kInProcess);
  CLI::Option* prompt =
      command->add_option("--prompt", options->prompt, "The text, or - for standard input");
  command->add_option("--prompt_ids", options->prompt_ids, "Token ids instead, with commas")
      ->delimiter(',')
      ->excludes(prompt);
  command->add_option_function<std::string>(
      "--request_id", [&request](const std::string& id) { request.set_request_id(id); },
      "Name of the request in logs; default: the router's");
  command->add_option_function<std::string>(
      "--cache_salt", [&request](const std::string& salt) { request.set_cache_salt(salt); },
      "Only requests with the same salt share cached blocks");
  command->add_option_function<int32_t>(
      "--priority", [&request](const int32_t& priority) { request.set_priority(priority); },
      "Higher is served first, -100 to 100");
  command->add_option_function<std::string>(
      "--tenant", [&request](const std::string& tenant) { request.set_tenant(tenant); },
      "Whose request this is: limits, fair shares and cached blocks are by tenant");
  command->add_option_function<uint32_t>(
      "--max_ttft_ms", [&request](const uint32_t& ms) { request.set_max_ttft_ms(ms); },
      "Refused if the first token is foreseen later");
  command->add_flag("--print_ids", options->print_ids, "Print the token ids after the text");
  command->add_flag("--quiet", options->quiet, "No summary on stderr");
  AddSamplingFlags(*command, request.mutable_sampling());
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

#include "cli/bench_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cli/grpc_backend.h"
#include "cli/load_plot.h"
#include "cli/load_progress.h"
#include "cli/load_report.h"
#include "cli/load_run.h"
#include "cli/load_trace.h"
#include "cli/openai_backend.h"
#include "cli/router_flags.h"
#include "ferry/v1/inference.pb.h"
#include "service/command_line.h"
#include "status/status_macros.h"

namespace cli {
namespace {

constexpr int32_t kMaxConcurrency = 4096;
constexpr int32_t kDefaultRequests = 16;
constexpr uint32_t kDefaultVocabSize = 30'000;

struct Options {
  std::string backend = "grpc";
  ferry::ClientOptions client;
  std::string base_url;
  std::string model;
  int32_t concurrency = 0;  // 0: one in a closed loop, as many as there are in an open one
  double request_rate = 0;
  int32_t requests = 0;  // 0: all of a dataset, else kDefaultRequests
  std::string input_tokens = "512";
  std::string output_tokens = "32";
  int32_t shared_prefix_tokens = 0;
  int32_t prefix_groups = 1;
  int32_t turns = 1;
  std::string dataset;
  std::string block_trace;
  std::optional<uint32_t> vocab_size;  // absent: what the server tells, else kDefaultVocabSize
  double temperature = 0;
  bool ignore_eos = true;
  ServiceLevel level;
  std::string json_path;
  std::string plot_path;
  std::optional<uint64_t> seed;  // absent: drawn, so that a second run finds nothing in caches
  absl::Duration ready_timeout = absl::Seconds(10);
  absl::Duration request_timeout = kRequestTimeout;
  absl::Duration stall_timeout = OpenAiOptions().stall_timeout;
};

struct Server {
  std::unique_ptr<LoadBackend> backend;
  std::string model;
  uint32_t vocab_size;
};

absl::StatusOr<Server> Connect(const Options& options) {
  const bool openai = options.backend == "openai";
  const std::string& own = openai ? options.base_url : options.client.address;
  const std::string& other = openai ? options.client.address : options.base_url;
  if (own.empty() || !other.empty()) {
    return absl::InvalidArgumentError(openai ? "--backend openai needs --base_url, and no --address"
                                             : "--backend grpc needs --address, and no --base_url");
  }
  if (openai) {
    const char* key = std::getenv("OPENAI_API_KEY");
    ASSIGN_OR_RETURN(auto backend,
                     OpenAiBackend::Connect({.base_url = options.base_url,
                                             .model = options.model,
                                             .api_key = key == nullptr ? "" : key,
                                             .tls_ca_file = options.client.tls_ca_file,
                                             .tls_cert_file = options.client.tls_cert_file,
                                             .tls_key_file = options.client.tls_key_file,
                                             .temperature = options.temperature,
                                             .ignore_eos = options.ignore_eos,
                                             .request_timeout = options.request_timeout,
                                             .stall_timeout = options.stall_timeout,
                                             .ready_timeout = options.ready_timeout}));
    std::string model = backend->model();
    const uint32_t told = backend->vocab_size().value_or(kDefaultVocabSize);
    return Server{std::move(backend), std::move(model), options.vocab_size.value_or(told)};
  }
  ASSIGN_OR_RETURN(auto backend, GrpcBackend::Connect({.client = options.client,
                                                       .model = options.model,
                                                       .temperature = options.temperature,
                                                       .ignore_eos = options.ignore_eos,
                                                       .request_timeout = options.request_timeout,
                                                       .ready_timeout = options.ready_timeout}));
  const ferry::v1::ModelCard model = backend->model();
  return Server{std::move(backend), model.name(), model.vocab_size()};
}

absl::StatusOr<std::unique_ptr<Trace>> ChooseTrace(const Options& options, uint32_t vocab_size,
                                                   uint64_t seed) {
  ASSIGN_OR_RETURN(const Lengths output, ParseLengths(options.output_tokens));
  if (!options.dataset.empty()) return ReadDataset(options.dataset, options.requests, output, seed);
  if (!options.block_trace.empty()) {
    return ReadBlockTrace(options.block_trace, options.requests, vocab_size, seed);
  }
  const int32_t requests = options.requests == 0 ? std::max(kDefaultRequests, options.turns) /
                                                       options.turns * options.turns
                                                 : options.requests;
  if (requests % options.turns != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--requests ", requests, " is no multiple of --turns ", options.turns));
  }
  TraceShape shape = {.num_conversations = requests / options.turns,
                      .turns = options.turns,
                      .output = output,
                      .shared_prefix_tokens = options.shared_prefix_tokens,
                      .prefix_groups = options.prefix_groups,
                      .vocab_size = vocab_size,
                      .seed = seed};
  ASSIGN_OR_RETURN(shape.input, ParseLengths(options.input_tokens));
  return MakeTrace(shape);
}

// Before the run, whose numbers would be lost; what the file has stays until then.
absl::Status CheckWritable(const std::string& path) {
  if (path.empty() || std::ofstream(path, std::ios::app)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot write ", path));
}

absl::Status Write(const std::string& path, const std::string& text) {
  if (path.empty() || (std::ofstream(path) << text << std::flush)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("cannot write ", path));
}

absl::Status Run(const Options& options) {
  RETURN_IF_ERROR(CheckWritable(options.json_path));
  RETURN_IF_ERROR(CheckWritable(options.plot_path));
  RETURN_IF_ERROR(ParseLengths(options.output_tokens).status());
  RETURN_IF_ERROR(ParseLengths(options.input_tokens).status());
  ASSIGN_OR_RETURN(const Server server, Connect(options));
  LoadReport report;
  report.seed = options.seed.value_or(uint64_t{std::random_device()()});
  ASSIGN_OR_RETURN(const auto trace, ChooseTrace(options, server.vocab_size, report.seed));
  report.model = server.model;
  report.backend = options.backend;
  report.load = trace->Describe();
  report.concurrency = options.concurrency;
  if (report.concurrency == 0) {
    report.concurrency =
        options.request_rate > 0 ? std::min(trace->num_conversations(), kMaxConcurrency) : 1;
  }
  report.request_rate = options.request_rate;
  report.level = options.level;
  {
    LoadProgress progress;
    std::optional<ProgressLine> line;
    if (isatty(STDERR_FILENO) != 0) line.emplace(progress, trace->num_requests(), std::cerr);
    LoadResult result = RunLoad(*trace,
                                {.concurrency = report.concurrency,
                                 .request_rate = report.request_rate,
                                 .seed = report.seed,
                                 .vocab_size = server.vocab_size},
                                *server.backend, SteadyClock(), progress);
    report.good = std::move(result.good);
    report.failures = std::move(result.failures);
    report.seconds = result.seconds;
  }
  std::cout << report.Text();
  RETURN_IF_ERROR(Write(options.json_path, report.Json() + "\n"));
  RETURN_IF_ERROR(Write(options.plot_path, absl::EndsWith(options.plot_path, ".svg")
                                               ? LoadPlotSvg(report)
                                               : LoadPlotHtml(report)));
  if (report.num_failed() > 0) {
    return absl::InternalError(absl::StrCat(report.good.empty() ? "all: " : "", report.num_failed(),
                                            " of ", report.num_requests(), " requests failed"));
  }
  return absl::OkStatus();
}

void AddLoadFlags(CLI::App& command, Options* options) {
  const auto add = [&command](const char* flag, auto& field, const char* help) {
    return command.add_option(flag, field, help)->capture_default_str();
  };
  const char* kLoad = "Load";
  add("--requests", options->requests, "Requests in all; 0: 16, or all of the file")
      ->check(CLI::Range(0, 100'000'000))
      ->group(kLoad);
  add("--concurrency", options->concurrency,
      "Conversations at a time, at most; 0: 1, with --request_rate 4096")
      ->check(CLI::Range(0, kMaxConcurrency))
      ->group(kLoad);
  add("--request_rate", options->request_rate,
      "Conversations that begin in a second, at random times (Poisson); 0: as soon as one of "
      "--concurrency has ended")
      ->check(service::NumberIn(0, 1e6))
      ->group(kLoad);
  add("--input_tokens", options->input_tokens,
      "Random ids a prompt: N, or LOW:HIGH with each as likely")
      ->group(kLoad);
  add("--output_tokens", options->output_tokens, "Tokens an answer: N, or LOW:HIGH")->group(kLoad);
  add("--shared_prefix_tokens", options->shared_prefix_tokens,
      "Ids before them, that conversations share")
      ->check(CLI::Range(0, 1 << 24))
      ->group(kLoad);
  add("--prefix_groups", options->prefix_groups, "Different shared prefixes")
      ->check(CLI::Range(1, 1 << 24))
      ->group(kLoad);
  add("--turns", options->turns,
      "Requests of a conversation: each prompt begins with what came before it and its answer")
      ->check(CLI::Range(1, 1 << 16))
      ->group(kLoad);
  CLI::Option* dataset = command.add_option(
      "--dataset", options->dataset,
      "File of prompts instead, a JSON object a line: prompt (text or ids) or messages; "
      "output_tokens");
  CLI::Option* block_trace = command.add_option(
      "--block_trace", options->block_trace,
      "File of lengths and shared blocks instead, as Mooncake publishes them, a JSON object a "
      "line: input_length, output_length, hash_ids (a number for each 512 tokens of the prompt)");
  for (CLI::Option* file : {dataset, block_trace}) {
    file->group(kLoad);
    for (const char* made :
         {"--input_tokens", "--shared_prefix_tokens", "--prefix_groups", "--turns"}) {
      file->excludes(command.get_option(made));
    }
  }
  block_trace->excludes(dataset)->excludes(command.get_option("--output_tokens"));
  add("--temperature", options->temperature, "0: greedy")
      ->check(service::NumberIn(0, 1e6))
      ->group(kLoad);
  add("--ignore_eos", options->ignore_eos, "Ask for all --output_tokens")->group(kLoad);
  command.add_option("--seed", options->seed, "Of prompts, arrivals and sampling; default: drawn")
      ->check(service::Unsigned64())
      ->group(kLoad);
}

}  // namespace

void AddBenchCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Measure a running system under load");
  const auto add = [command](const char* flag, auto& field, const char* help) {
    return command->add_option(flag, field, help)->capture_default_str();
  };
  add("--backend", options->backend, "grpc, or openai: any server of OpenAI's HTTP API")
      ->check(CLI::IsMember({"grpc", "openai"}));
  AddAddressFlag(*command, "host:port of the router", &options->client);
  command->add_option(
      "--base_url", options->base_url,
      "http://host:port of an OpenAI server; the key is OPENAI_API_KEY of the environment");
  AddTlsFlags(*command, &options->client);
  add("--model", options->model, "Served model; may be left out when there is one");
  command
      ->add_option("--vocab_size", options->vocab_size,
                   "Random ids are below it, with openai; default: the vocab_size of /v1/models, "
                   "which Ferry tells, else 30000")
      ->check(CLI::Range(1u, uint32_t{1} << 31));
  service::AddSecondsFlag(
      *command, "--ready_timeout_s", &options->ready_timeout,
      "Until the model must be ready; with openai, the server up and the model listed")
      ->check(CLI::PositiveNumber);
  service::AddSecondsFlag(*command, "--request_timeout_s", &options->request_timeout,
                          "A request whose answer has not ended by then has failed")
      ->check(CLI::PositiveNumber);
  service::AddSecondsFlag(*command, "--stall_timeout_s", &options->stall_timeout,
                          "With openai, so has one without output for so long after its first; a "
                          "router has --stream_idle_s")
      ->check(CLI::PositiveNumber);
  AddLoadFlags(*command, options.get());
  const char* kReport = "Report";
  add("--slo_ttft_ms", options->level.ttft_ms,
      "Goodput counts requests with at most this time to the first token; 0: any")
      ->check(service::NumberIn(0, 1e9))
      ->group(kReport);
  add("--slo_tpot_ms", options->level.tpot_ms, "... and with this time a further token; 0: any")
      ->check(service::NumberIn(0, 1e9))
      ->group(kReport);
  add("--slo_itl_ms", options->level.itl_ms,
      "... and with this time between tokens in 99 of 100 cases; 0: any")
      ->check(service::NumberIn(0, 1e9))
      ->group(kReport);
  add("--slo_e2e_ms", options->level.e2e_ms, "... and with this time to the last token; 0: any")
      ->check(service::NumberIn(0, 1e9))
      ->group(kReport);
  command->add_option("--json", options->json_path, "File that receives the numbers as JSON")
      ->group(kReport);
  command
      ->add_option("--plot", options->plot_path,
                   "File that receives them as one page: .svg, else HTML")
      ->group(kReport);
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

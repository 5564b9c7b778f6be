#include "cli/bench_command.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/load_report.h"
#include "cli/router_flags.h"
#include "client/ferry_client.h"
#include "ferry/v1/inference.pb.h"
#include "service/command_line.h"
#include "status/status_macros.h"

namespace cli {
namespace {

struct Options {
  ferry::ClientOptions client;
  std::string model;
  int32_t concurrency = 1;
  int32_t requests = 16;
  int32_t input_tokens = 128;
  int32_t output_tokens = 32;
  double temperature = 0;
  double request_rate = 0;  // a second; 0: closed loop
  ServiceLevel level;
  std::string json_path;
  std::optional<uint64_t> seed;  // absent: drawn, so that a second run finds nothing in caches
  absl::Duration ready_timeout = absl::Seconds(10);
};

// Prompts are random ids, different for each request, so that no cache helps.
ferry::v1::GenerateRequest MakeRequest(const Options& options, const ferry::v1::ModelCard& model,
                                       uint64_t base_seed, int32_t number) {
  ferry::v1::GenerateRequest request;
  request.set_model(model.name());
  std::seed_seq seed{static_cast<uint32_t>(base_seed), static_cast<uint32_t>(base_seed >> 32),
                     static_cast<uint32_t>(number)};
  std::mt19937 random(seed);
  for (int32_t i = 0; i < options.input_tokens; ++i) {
    request.mutable_tokens()->add_ids(random() % model.vocab_size());
  }
  ferry::v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(static_cast<float>(options.temperature));
  sampling.set_max_tokens(options.output_tokens);
  sampling.set_ignore_eos(true);
  sampling.set_seed(base_seed + number);
  return request;
}

// When each request is due after the start: a Poisson process, the same for equal seeds.
std::vector<absl::Duration> Arrivals(const Options& options, uint64_t seed) {
  std::vector<absl::Duration> due(options.requests, absl::ZeroDuration());
  if (options.request_rate <= 0) return due;
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(options.request_rate);
  double at = 0;
  for (absl::Duration& one : due) one = absl::Seconds(at += gap(random));
  return due;
}

// `due`: when the request's user began to wait.
absl::StatusOr<MeasuredRequest> RunOne(ferry::Client& client,
                                       const ferry::v1::GenerateRequest& request, absl::Time due) {
  MeasuredRequest measured;
  absl::Time first, last;
  uint32_t first_tokens = 0;  // of the first message; the time per token is that of the others
  RETURN_IF_ERROR(client.Generate(request, [&](const ferry::v1::GenerateResponse& response) {
    const int tokens = response.token_ids_size();
    if (tokens == 0) return true;
    const absl::Time now = absl::Now();
    if (measured.num_tokens == 0) {
      first = now;
      first_tokens = tokens;
    } else {
      const double each = absl::ToDoubleMilliseconds(now - last) / tokens;
      measured.itl_ms.insert(measured.itl_ms.end(), tokens, each);
    }
    last = now;
    measured.num_tokens += tokens;
    return true;
  }));
  measured.total_ms = absl::ToDoubleMilliseconds(absl::Now() - due);
  if (measured.num_tokens == 0) return absl::DataLossError("the stream had no tokens");
  measured.ttft_ms = absl::ToDoubleMilliseconds(first - due);
  if (measured.num_tokens > first_tokens) {
    measured.tpot_ms =
        absl::ToDoubleMilliseconds(last - first) / (measured.num_tokens - first_tokens);
  }
  return measured;
}

absl::StatusOr<ferry::v1::ModelCard> FindModel(ferry::Client& client, const std::string& name) {
  ASSIGN_OR_RETURN(const auto models, client.ListModels());
  for (const auto& card : models) {
    if (name.empty() ? models.size() == 1 : card.name() == name) return card;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the router serves ", models.size(), " models: choose one with --model"));
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto client, ferry::Client::Create(options.client));
  RETURN_IF_ERROR(ExplainConnection(client->WaitUntilReady(options.model, options.ready_timeout),
                                    options.client));
  ASSIGN_OR_RETURN(const ferry::v1::ModelCard model, FindModel(*client, options.model));
  std::ofstream json;
  if (!options.json_path.empty()) {
    json.open(options.json_path);
    if (!json) return absl::InvalidArgumentError(absl::StrCat("cannot write ", options.json_path));
  }

  LoadReport report{.model = model.name(),
                    .num_requests = options.requests,
                    .input_tokens = options.input_tokens,
                    .output_tokens = options.output_tokens,
                    .concurrency = options.concurrency,
                    .request_rate = options.request_rate,
                    .seed = options.seed.value_or(uint64_t{std::random_device()()}),
                    .level = options.level};
  const std::vector<absl::Duration> arrivals = Arrivals(options, report.seed);
  std::mutex mutex;  // guards the report's findings; taken once a request
  std::atomic<int32_t> next{0};
  const absl::Time start = absl::Now();
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < std::min(options.concurrency, options.requests); ++t) {
    threads.emplace_back([&] {
      for (int32_t number; (number = next++) < options.requests;) {
        const ferry::v1::GenerateRequest request = MakeRequest(options, model, report.seed, number);
        const absl::Time due = options.request_rate > 0 ? start + arrivals[number] : absl::Now();
        absl::SleepFor(due - absl::Now());
        auto measured = RunOne(*client, request, due);
        const std::lock_guard<std::mutex> lock(mutex);
        if (measured.ok()) {
          report.good.push_back(*std::move(measured));
        } else {
          ++report.failures[absl::StatusCodeToString(measured.status().code()) + ": " +
                            std::string(measured.status().message())];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  report.seconds = absl::ToDoubleSeconds(absl::Now() - start);

  std::cout << report.Text();
  if (json.is_open() && !(json << report.Json() << std::endl)) {
    return absl::DataLossError(absl::StrCat("cannot write ", options.json_path));
  }
  if (report.num_failed() > 0) {
    return absl::InternalError(absl::StrCat(report.num_failed(), " requests failed"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Measure a running system under load");
  const auto add = [command](const char* flag, auto& field, const char* help) {
    return command->add_option(flag, field, help)->capture_default_str();
  };
  add("--address", options->client.address, "host:port of the router")->required();
  AddTlsFlags(*command, &options->client);
  add("--model", options->model, "Served model; may be left out when there is one");
  add("--concurrency", options->concurrency, "Requests at a time, at most")
      ->check(CLI::Range(1, 4096));
  add("--request_rate", options->request_rate,
      "Requests a second at random times (Poisson); 0: as soon as one of --concurrency has ended")
      ->check(CLI::Range(0.0, 1e6));
  add("--requests", options->requests, "Requests in all")->check(CLI::Range(1, 100'000'000));
  add("--input_tokens", options->input_tokens, "Random ids a prompt")
      ->check(CLI::Range(1, 1 << 24));
  add("--output_tokens", options->output_tokens, "Tokens a request")->check(CLI::Range(1, 1 << 24));
  add("--temperature", options->temperature, "0: greedy");
  add("--slo_ttft_ms", options->level.ttft_ms,
      "Goodput counts requests with at most this time to the first token; 0: any")
      ->check(CLI::Range(0.0, 1e9));
  add("--slo_tpot_ms", options->level.tpot_ms, "... and with this time a further token; 0: any")
      ->check(CLI::Range(0.0, 1e9));
  command->add_option("--json", options->json_path, "File that receives the numbers as JSON");
  command->add_option("--seed", options->seed, "Of prompts and sampling; default: drawn")
      ->check(service::Unsigned64());
  service::AddSecondsFlag(*command, "--ready_timeout_s", &options->ready_timeout,
                          "Until the model must be ready");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

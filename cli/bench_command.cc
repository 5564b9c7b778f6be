#include "cli/bench_command.h"

#include <atomic>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/latency_stats.h"
#include "cli/router_flags.h"
#include "client/ferry_client.h"
#include "ferry/v1/inference.pb.h"
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
  std::optional<uint64_t> seed;  // absent: drawn, so that a second run finds nothing in caches
  double ready_timeout_s = 10;
};

// What one request's user saw.
struct Measured {
  double ttft_ms = 0;
  double tpot_ms = 0;  // per token after the first message; 0 without any
  double total_ms = 0;
  uint32_t num_tokens = 0;
};

// What all threads found; each takes the mutex once a request.
struct Findings {
  std::mutex mutex;  // guards the two below
  std::vector<Measured> good;
  std::map<std::string, int32_t> failures;  // by code and message
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

absl::StatusOr<Measured> RunOne(ferry::Client& client, const ferry::v1::GenerateRequest& request) {
  Measured measured;
  const absl::Time start = absl::Now();
  absl::Time first, last;
  uint32_t first_tokens = 0;  // of the first message; the time per token is that of the others
  RETURN_IF_ERROR(client.Generate(request, [&](const ferry::v1::GenerateResponse& response) {
    if (response.token_ids().empty()) return true;
    last = absl::Now();
    if (measured.num_tokens == 0) {
      first = last;
      first_tokens = response.token_ids_size();
    }
    measured.num_tokens += response.token_ids_size();
    return true;
  }));
  measured.total_ms = absl::ToDoubleMilliseconds(absl::Now() - start);
  if (measured.num_tokens == 0) return absl::DataLossError("the stream had no tokens");
  measured.ttft_ms = absl::ToDoubleMilliseconds(first - start);
  if (measured.num_tokens > first_tokens) {
    measured.tpot_ms =
        absl::ToDoubleMilliseconds(last - first) / (measured.num_tokens - first_tokens);
  }
  return measured;
}

void PrintTimes(const char* what, const std::vector<Measured>& all, double Measured::*member) {
  std::vector<double> values;
  for (const Measured& one : all) values.push_back(one.*member);
  const LatencyStats stats = Summarize(std::move(values));
  std::cout << absl::StrFormat("%-10s mean %9.2f  median %9.2f  p99 %9.2f\n", what, stats.mean,
                               stats.median, stats.p99);
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto client, ferry::Client::Create(options.client));
  RETURN_IF_ERROR(ExplainConnection(
      client->WaitUntilReady(options.model, absl::Seconds(options.ready_timeout_s)),
      options.client));
  ASSIGN_OR_RETURN(const auto models, client->ListModels());
  const ferry::v1::ModelCard* model = nullptr;
  for (const auto& card : models) {
    if (options.model.empty() ? models.size() == 1 : card.name() == options.model) model = &card;
  }
  if (model == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the router serves ", models.size(), " models: choose one with --model"));
  }

  const uint64_t seed = options.seed.value_or(uint64_t{std::random_device()()});
  Findings findings;
  std::atomic<int32_t> next{0};
  const absl::Time start = absl::Now();
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < options.concurrency; ++t) {
    threads.emplace_back([&] {
      for (int32_t number; (number = next++) < options.requests;) {
        const auto measured = RunOne(*client, MakeRequest(options, *model, seed, number));
        const std::lock_guard<std::mutex> lock(findings.mutex);
        if (measured.ok()) {
          findings.good.push_back(*measured);
        } else {
          ++findings.failures[absl::StatusCodeToString(measured.status().code()) + ": " +
                              std::string(measured.status().message())];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);

  int64_t num_tokens = 0;
  int32_t num_failed = 0;
  for (const Measured& one : findings.good) num_tokens += one.num_tokens;
  for (const auto& [what, count] : findings.failures) num_failed += count;
  std::cout << absl::StrFormat(
      "%s: %d requests of %d in, %d out, %d at a time: %d good, %d failed, %.2f s, seed %u\n",
      model->name(), options.requests, options.input_tokens, options.output_tokens,
      options.concurrency, findings.good.size(), num_failed, seconds, seed);
  PrintTimes("TTFT ms", findings.good, &Measured::ttft_ms);
  PrintTimes("TPOT ms", findings.good, &Measured::tpot_ms);
  PrintTimes("total ms", findings.good, &Measured::total_ms);
  std::cout << absl::StrFormat(
      "throughput %.2f requests/s, %.1f output tokens/s, %.1f tokens/s in and out\n",
      findings.good.size() / seconds, num_tokens / seconds,
      (num_tokens + int64_t{options.input_tokens} * static_cast<int64_t>(findings.good.size())) /
          seconds);
  for (const auto& [what, count] : findings.failures) std::cout << count << " x " << what << "\n";
  if (num_failed > 0) return absl::InternalError(absl::StrCat(num_failed, " requests failed"));
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Measure a running system with a closed loop");
  const auto add = [command](const char* flag, auto& field, const char* help) {
    return command->add_option(flag, field, help)->capture_default_str();
  };
  add("--address", options->client.address, "host:port of the router")->required();
  AddTlsFlags(*command, &options->client);
  add("--model", options->model, "Served model; may be left out when there is one");
  add("--concurrency", options->concurrency, "Requests at a time")->check(CLI::Range(1, 4096));
  add("--requests", options->requests, "Requests in all")->check(CLI::Range(1, 100'000'000));
  add("--input_tokens", options->input_tokens, "Random ids a prompt")
      ->check(CLI::Range(1, 1 << 24));
  add("--output_tokens", options->output_tokens, "Tokens a request")->check(CLI::Range(1, 1 << 24));
  add("--temperature", options->temperature, "0: greedy");
  command->add_option("--seed", options->seed, "Of prompts and sampling; default: drawn");
  add("--ready_timeout_s", options->ready_timeout_s, "Until the model must be ready");
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

// What a request costs the router, and what it adds to the time to the first token: a real
// ferry-router between this program's clients and its scripted workers, which answer at once.
//
//   router_load --model_assets DIR [--router build/release/bin/ferry-router] [--prompt_tokens 2048]
//
// Throughput is given per core of the router, from its CPU time, so that what else runs on the
// machine matters little.  The times are the clients', from the request to the first message, and
// contain two gRPC hops: an upper bound of the router's own share.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/ferry_client.h"
#include "status/check.h"
#include "tests/fakes/fake_worker.h"
#include "tests/integration/child_process.h"

namespace {

constexpr int kWorkers = 4;  // half of them prefill
constexpr int kConcurrency = 32;

struct Options {
  std::string router = "build/release/bin/ferry-router";
  std::string model_assets;
  int prompt_tokens = 2048;
  int requests = 2000;
  double rate = 100;
};

// CPU seconds of a process.
double CpuSeconds(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(stat)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string word;
  double ticks = 0;
  for (int field = 3; field <= 15 && fields >> word; ++field) {
    if (field >= 14) ticks += std::stod(word);
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Prompts that share nothing.
class Prompts {
 public:
  Prompts(ferry::Client* client, const Options& options) : options_(options) {
    // English-like text of about as many tokens: measured once.
    const std::string sample = Words(4000);
    const auto ids = client->Tokenize("m", sample, false);
    FERRY_CHECK(ids.ok()) << ids.status();
    words_ = static_cast<int>(4000.0 * options.prompt_tokens / static_cast<double>(ids->size()));
  }

  ferry::v1::GenerateRequest Next(bool text) {
    ferry::v1::GenerateRequest request;
    request.mutable_sampling()->set_max_tokens(8);
    if (text) {
      request.set_text(Words(words_));
    } else {
      for (int i = 0; i < options_.prompt_tokens; ++i) {
        request.mutable_tokens()->add_ids(static_cast<uint32_t>(random_() % 200));
      }
    }
    return request;
  }

 private:
  std::string Words(int count) {
    static constexpr const char* kWords[] = {
        "the", "ferry", "left",     "at",    "dawn",  "and",    "its",  "crew", "sang",
        "of",  "quiet", "harbours", "while", "gulls", "turned", "over", "grey", "water"};
    std::string text;
    for (int i = 0; i < count; ++i) {
      absl::StrAppend(&text, i > 0 ? " " : "", kWords[random_() % std::size(kWords)]);
    }
    return text;
  }

  const Options options_;
  std::mt19937 random_{5};
  int words_ = 0;
};

// Requests under way, and what became of them.
class Calls {
 public:
  explicit Calls(ferry::Client* client) : client_(client) {}

  void Start(const ferry::v1::GenerateRequest& request) {
    const absl::Time start = absl::Now();
    auto first = std::make_shared<bool>(true);
    {
      std::lock_guard lock(mutex_);
      ++running_;
    }
    auto call = client_->Start(
        request,
        [this, start, first](const ferry::v1::GenerateResponse& response) {
          if (std::exchange(*first, false)) {
            std::lock_guard lock(mutex_);
            first_ms_.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
          }
          (void)response;
          return true;
        },
        [this](const absl::Status& status) {
          std::lock_guard lock(mutex_);
          if (!status.ok()) failure_ = status;
          --running_;
          changed_.notify_all();
        });
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  void WaitForRunning(int most) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ <= most; });
    FERRY_CHECK(failure_.ok()) << failure_;
  }
  double FirstMs(double share) {
    std::sort(first_ms_.begin(), first_ms_.end());
    return first_ms_[static_cast<size_t>(share * static_cast<double>(first_ms_.size() - 1))];
  }

 private:
  ferry::Client* const client_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  int running_ = 0;
  absl::Status failure_;
  std::vector<double> first_ms_;
  std::vector<std::unique_ptr<ferry::RunningGeneration>> calls_;
};

void Throughput(const Options& options, ferry::Client* client, Prompts* prompts, pid_t router,
                bool text) {
  Calls calls(client);
  std::vector<ferry::v1::GenerateRequest> requests;
  for (int i = 0; i < options.requests; ++i) requests.push_back(prompts->Next(text));
  const double cpu = CpuSeconds(router);
  const absl::Time start = absl::Now();
  for (const auto& request : requests) {
    calls.Start(request);
    calls.WaitForRunning(kConcurrency - 1);
  }
  calls.WaitForRunning(0);
  const double cpu_used = CpuSeconds(router) - cpu;
  std::printf("%-9s %6.0f requests/s a core of the router (%.0f us of CPU each); %.0f/s here\n",
              text ? "text" : "token ids", options.requests / cpu_used,
              1e6 * cpu_used / options.requests,
              options.requests / absl::ToDoubleSeconds(absl::Now() - start));
  std::fflush(stdout);
}

void Latency(const Options& options, ferry::Client* client, Prompts* prompts, bool text) {
  Calls calls(client);
  std::mt19937 random(3);
  std::exponential_distribution<double> gap(options.rate);
  std::vector<ferry::v1::GenerateRequest> requests;
  for (int i = 0; i < options.requests; ++i) requests.push_back(prompts->Next(text));
  absl::Time next = absl::Now();
  for (const auto& request : requests) {
    absl::SleepFor(next - absl::Now());
    calls.Start(request);
    next += absl::Seconds(gap(random));
  }
  calls.WaitForRunning(0);
  std::printf("%-9s first message at %.0f requests/s: median %.2f ms, p99 %.2f ms\n",
              text ? "text" : "token ids", options.rate, calls.FirstMs(0.5), calls.FirstMs(0.99));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("loads a real router between scripted clients and workers");
  app.add_option("--router", options.router);
  app.add_option("--model_assets", options.model_assets, "with room for the prompt")->required();
  app.add_option("--prompt_tokens", options.prompt_tokens)->check(CLI::Range(1, 100000));
  app.add_option("--requests", options.requests)->check(CLI::PositiveNumber);
  app.add_option("--rate", options.rate, "requests per second")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  fakes::FakeWorker::Directory directory;
  std::vector<std::unique_ptr<fakes::FakeWorker>> workers;
  std::vector<std::string> addresses;
  for (int i = 0; i < kWorkers; ++i) {
    fakes::FakeWorker::Options worker;
    worker.role = i % 2 == 0 ? ferry::v1::WORKER_ROLE_PREFILL : ferry::v1::WORKER_ROLE_DECODE;
    worker.num_blocks = 1 << 20;
    worker.max_model_len = 1 << 20;
    workers.push_back(std::make_unique<fakes::FakeWorker>(worker, &directory));
    addresses.push_back(workers.back()->address());
  }
  const std::string dir = integration::MakeTestDir();
  const auto router = integration::ChildProcess::Start(
      {options.router, absl::StrCat("--model_assets=m=", options.model_assets),
       absl::StrCat("--workers=", absl::StrJoin(addresses, ",")), "--listen=127.0.0.1:0",
       "--metrics_listen=127.0.0.1:0", "--log_level=warn",
       absl::StrCat("--port_file=", dir, "/port")},
      dir + "/router.log");
  const auto port = integration::WaitForPort(dir + "/port", "grpc_port", absl::Seconds(20));
  FERRY_CHECK(port.ok()) << port.status() << "\n" << router.log();
  auto client = ferry::Client::Create({.address = absl::StrCat("127.0.0.1:", *port)});
  FERRY_CHECK(client.ok()) << client.status();
  const absl::Status ready = (*client)->WaitUntilReady("m", absl::Seconds(20));
  FERRY_CHECK(ready.ok()) << ready << "\n" << router.log();
  Prompts prompts(client->get(), options);
  std::printf("prompts of %d tokens, %d workers, %d at a time\n", options.prompt_tokens, kWorkers,
              kConcurrency);
  for (const bool text : {false, true}) {
    Throughput(options, client->get(), &prompts, router.pid(), text);
    Latency(options, client->get(), &prompts, text);
  }
  return 0;
}

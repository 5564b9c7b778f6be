// What a request costs the router, and what it adds to the time to the first token: a real
// ferry-router between this program's clients and its scripted workers, which answer at once.
//
//   router_load --model_assets DIR [--router build/release/bin/ferry-router] [--prompt_tokens 2048]
//
// Throughput is given per core of the router, from its CPU time, so that what else runs on the
// machine matters little.  The times are the clients', from the request to the first message; the
// router's own share is what they are longer than those of a client that talks to the workers
// itself, so it contains the hop to the router and back.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/ferry_client.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "nlohmann/json.hpp"
#include "status/check.h"
#include "tests/fakes/fake_worker.h"
#include "tests/integration/child_process.h"
#include "tests/router/http/http_client.h"

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
    {
      std::lock_guard lock(mutex_);
      ++running_;
    }
    auto call = client_->Start(
        request, [](const ferry::v1::GenerateResponse&) { return true; },
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

 private:
  ferry::Client* const client_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  int running_ = 0;
  absl::Status failure_;
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

// A request from its sending to its first message.
class Way {
 public:
  explicit Way(const char* name) : name_(name) {}
  virtual ~Way() = default;
  // What is sent, made before the clock runs.
  virtual std::function<void()> Prepare(Prompts* prompts) = 0;
  void Took(absl::Duration duration) {
    const std::lock_guard lock(mutex_);
    ms_.push_back(absl::ToDoubleMilliseconds(duration));
  }
  const char* name() const { return name_; }
  double Ms(double share) {
    std::sort(ms_.begin(), ms_.end());
    return ms_[static_cast<size_t>(share * static_cast<double>(ms_.size() - 1))];
  }

 protected:
  // Runs `rest` of a request whose clock started at `start`; it calls what it is given once.
  void Measure(const std::function<void(const std::function<void()>& on_first)>& request) {
    const absl::Time start = absl::Now();
    bool first = true;
    request([&] {
      if (std::exchange(first, false)) Took(absl::Now() - start);
    });
    FERRY_CHECK(!first) << name_ << " gave no message";
  }

 private:
  const char* const name_;
  std::mutex mutex_;  // guards ms_
  std::vector<double> ms_;
};

// Both workers without a router: what it would say to them, said by this client.
class DirectWay final : public Way {
 public:
  DirectWay(const fakes::FakeWorker& prefill, const fakes::FakeWorker& decode)
      : Way("workers alone"),
        prefill_(prefill),
        decode_(decode),
        prefill_stub_(ferry::v1::PrefillWorker::NewStub(ChannelTo(prefill))),
        decode_stub_(ferry::v1::DecodeWorker::NewStub(ChannelTo(decode))) {}

  std::function<void()> Prepare(Prompts* prompts) override {
    auto prefill = std::make_shared<ferry::v1::PrefillRequest>();
    auto decode = std::make_shared<ferry::v1::DecodeRequest>();
    ferry::v1::RequestSpec& spec = *decode->mutable_spec();
    spec.mutable_key()->set_request_id(absl::StrCat("direct-", ++count_));
    spec.mutable_key()->set_attempt(1);
    const ferry::v1::GenerateRequest prompt = prompts->Next(/*text=*/false);
    *spec.mutable_token_ids() = prompt.tokens().ids();
    spec.set_num_prompt_tokens(spec.token_ids_size());
    spec.mutable_sampling()->set_max_tokens(8);
    spec.mutable_sampling()->set_n(1);
    spec.set_model("m");
    decode->set_worker_epoch(decode_.epoch());
    decode->mutable_prefill()->set_address(prefill_.address());
    decode->mutable_prefill()->set_epoch(prefill_.epoch());
    *prefill->mutable_spec() = spec;
    prefill->set_worker_epoch(prefill_.epoch());
    prefill->mutable_decode()->set_address(decode_.address());
    prefill->mutable_decode()->set_epoch(decode_.epoch());
    return [this, prefill, decode] {
      Measure([&](const std::function<void()>& on_first) {
        grpc::ClientContext decode_context, prefill_context;
        const auto tokens = decode_stub_->Decode(&decode_context, *decode);
        ferry::v1::DecodeEvent event;
        FERRY_CHECK(tokens->Read(&event) && event.has_accepted()) << event.ShortDebugString();
        const auto progress = prefill_stub_->Prefill(&prefill_context, *prefill);
        while (tokens->Read(&event)) {
          if (event.has_tokens()) on_first();
        }
        ferry::v1::PrefillEvent ignored;
        while (progress->Read(&ignored)) {
        }
        FERRY_CHECK(tokens->Finish().ok() && progress->Finish().ok());
      });
    };
  }

 private:
  static std::shared_ptr<grpc::Channel> ChannelTo(const fakes::FakeWorker& worker) {
    return grpc::CreateChannel(worker.address(), grpc::InsecureChannelCredentials());
  }

  const fakes::FakeWorker& prefill_;
  const fakes::FakeWorker& decode_;
  const std::unique_ptr<ferry::v1::PrefillWorker::Stub> prefill_stub_;
  const std::unique_ptr<ferry::v1::DecodeWorker::Stub> decode_stub_;
  int64_t count_ = 0;
};

class GrpcWay final : public Way {
 public:
  GrpcWay(const char* name, ferry::Client* client, bool text)
      : Way(name), client_(client), text_(text) {}
  std::function<void()> Prepare(Prompts* prompts) override {
    return [this, request = prompts->Next(text_)] {
      Measure([&](const std::function<void()>& on_first) {
        const absl::Status status = client_->Generate(request, [&](const auto&) {
          on_first();
          return true;
        });
        FERRY_CHECK(status.ok()) << status;
      });
    };
  }

 private:
  ferry::Client* const client_;
  const bool text_;
};

// OpenAI's API, on connections that are kept.
class HttpWay final : public Way {
 public:
  explicit HttpWay(int port) : Way("text, HTTP"), port_(port) {}
  std::function<void()> Prepare(Prompts* prompts) override {
    const nlohmann::json body = {
        {"prompt", prompts->Next(/*text=*/true).text()}, {"max_tokens", 8}, {"stream", true}};
    return [this, body = body.dump()] {
      std::unique_ptr<router::http::HttpClient> client = Take();
      Measure([&](const std::function<void()>& on_first) {
        client->Ask("/v1/completions", body);
        client->ReadUntil("data: ");
        on_first();
        FERRY_CHECK(client->Read().done());
      });
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(client));
    };
  }

 private:
  std::unique_ptr<router::http::HttpClient> Take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<router::http::HttpClient>(port_);
    auto client = std::move(idle_.back());
    idle_.pop_back();
    return client;
  }

  const int port_;
  std::mutex mutex_;  // guards idle_
  std::vector<std::unique_ptr<router::http::HttpClient>> idle_;
};

// The ways take turns in one stream of random arrivals, so that whatever else the machine does
// meets all of them.  The first one is without the router, which gets `rate` from the others.
void FirstMessages(const Options& options, Prompts* prompts,
                   const std::vector<std::unique_ptr<Way>>& ways) {
  std::vector<std::function<void()>> requests;
  for (size_t i = 0; i < options.requests * ways.size(); ++i) {
    requests.push_back(ways[i % ways.size()]->Prepare(prompts));
  }
  std::mt19937 random(3);
  std::exponential_distribution<double> gap(options.rate * static_cast<double>(ways.size()) /
                                            static_cast<double>(ways.size() - 1));
  std::vector<std::thread> threads;
  absl::Time next = absl::Now();
  for (const auto& request : requests) {
    absl::SleepFor(next - absl::Now());
    threads.emplace_back(request);
    next += absl::Seconds(gap(random));
  }
  for (std::thread& thread : threads) thread.join();
  const double median = ways[0]->Ms(0.5), p99 = ways[0]->Ms(0.99);
  for (const auto& way : ways) {
    std::printf("%-15s first message: median %6.2f ms, p99 %6.2f ms", way->name(), way->Ms(0.5),
                way->Ms(0.99));
    if (way != ways[0]) {
      std::printf("; added by the router: %6.2f, %6.2f", way->Ms(0.5) - median,
                  way->Ms(0.99) - p99);
    }
    std::printf("\n");
  }
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
       "--http_listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--log_level=warn",
       absl::StrCat("--port_file=", dir, "/port")},
      dir + "/router.log");
  const auto port = integration::WaitForPort(dir + "/port", "grpc_port", absl::Seconds(20));
  FERRY_CHECK(port.ok()) << port.status() << "\n" << router.log();
  const auto http_port = integration::WaitForPort(dir + "/port", "http_port", absl::Seconds(20));
  FERRY_CHECK(http_port.ok()) << http_port.status() << "\n" << router.log();
  auto client = ferry::Client::Create({.address = absl::StrCat("127.0.0.1:", *port)});
  FERRY_CHECK(client.ok()) << client.status();
  const absl::Status ready = (*client)->WaitUntilReady("m", absl::Seconds(20));
  FERRY_CHECK(ready.ok()) << ready << "\n" << router.log();
  Prompts prompts(client->get(), options);
  std::printf("prompts of %d tokens, %d workers, %d at a time\n", options.prompt_tokens, kWorkers,
              kConcurrency);
  for (const bool text : {false, true}) {
    Throughput(options, client->get(), &prompts, router.pid(), text);
  }
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(std::make_unique<DirectWay>(*workers[0], *workers[1]));
  ways.push_back(std::make_unique<GrpcWay>("token ids, gRPC", client->get(), /*text=*/false));
  ways.push_back(std::make_unique<GrpcWay>("text, gRPC", client->get(), /*text=*/true));
  ways.push_back(std::make_unique<HttpWay>(*http_port));
  std::printf("%.0f requests/s at the router\n", options.rate);
  FirstMessages(options, &prompts, ways);
  return 0;
}

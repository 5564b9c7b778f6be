#include "tests/chaos/faults.h"

#include <signal.h>

#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"

namespace chaos {
namespace {

using integration::Ask;
using integration::FerrySystem;
using integration::MakePrompt;
using integration::WorkerProcess;

WorkerProcess& AnyPrefill(Stage& stage, std::mt19937_64& random) {
  return stage.system().prefill(static_cast<int>(random() % 2));
}
WorkerProcess& AnyDecode(Stage& stage, std::mt19937_64& random) {
  return stage.system().decode(static_cast<int>(random() % 2));
}
WorkerProcess& AnyWorker(Stage& stage, std::mt19937_64& random) {
  return random() % 2 == 0 ? AnyPrefill(stage, random) : AnyDecode(stage, random);
}

// Below, around and above the limits of a stalled transfer (2 s) and of a silent worker (3.5 s).
absl::Duration AnyWhile(std::mt19937_64& random) {
  return absl::Milliseconds(200 << (random() % 6));
}

void Hold(Stage& stage, std::mt19937_64& random) {
  stage.Let(1 + static_cast<int64_t>(random() % 400), AnyWhile(random));
}

void StandStill(Stage& stage, WorkerProcess& worker, std::mt19937_64& random) {
  worker.process.Signal(SIGSTOP);
  Hold(stage, random);
  worker.process.Signal(SIGCONT);
}

void StopWriter(Stage& stage, std::mt19937_64& random) {
  WorkerProcess& receiver = AnyDecode(stage, random);
  FerrySystem::WaitForLoad(
      receiver, [](const auto& load) { return load.kv_blocks().reserved() > 0; }, absl::Seconds(2));
  // Whoever writes there stops at once.
  const bool both = random() % 2 == 0;
  for (int i = 0; i < 2; ++i) {
    if (both || random() % 2 == 0) stage.system().prefill(i).process.Signal(SIGSTOP);
  }
  Hold(stage, random);
  for (int i = 0; i < 2; ++i) stage.system().prefill(i).process.Signal(SIGCONT);
}

void RestartRouter(Stage& stage, std::mt19937_64&) {
  stage.observer().SetNobodyThere(true);
  stage.system().RestartRouter();
  stage.observer().SetNobodyThere(false);
}

void CutSomePair(Stage& stage, std::mt19937_64& random) {
  const std::string decode = AnyDecode(stage, random).name;
  stage.network().Cut(AnyPrefill(stage, random).name, decode);
  Hold(stage, random);
  stage.network().Heal();
}

void LoseSome(Stage& stage, std::mt19937_64& random) {
  stage.network().Lose(AnyWorker(stage, random).name, 10 + static_cast<int>(random() % 90));
  Hold(stage, random);
  stage.network().Heal();
}

void PullCable(Stage& stage, std::mt19937_64& random) {
  const std::string node = AnyWorker(stage, random).name;
  stage.network().SetLink(node, false);
  Hold(stage, random);
  stage.network().SetLink(node, true);
}

void Delay(Stage& stage, std::mt19937_64& random) {
  Relay& relay = stage.relay(AnyWorker(stage, random));
  relay.SetDelay(absl::Milliseconds(20 + random() % 100));
  Hold(stage, random);
  relay.SetDelay(absl::ZeroDuration());
}

void HalfOpen(Stage& stage, std::mt19937_64& random) {
  Relay& relay = stage.relay(AnyWorker(stage, random));
  relay.SetSilent(true);
  Hold(stage, random);
  relay.SetSilent(false);
}

// More than the pools hold.
void FillPools(Stage& stage, std::mt19937_64& random) {
  std::vector<std::thread> crowd;
  for (int i = 0; i < 6; ++i) {
    crowd.emplace_back([&stage, seed = random()] {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(4)));
      Ask ask = {MakePrompt(600, static_cast<uint32_t>(seed), 400), 300, 1 + seed % 1000};
      ferry::v1::GenerateRequest request = ToRequest(ask);
      request.mutable_sampling()->set_n(4);
      const auto stub = ferry::v1::Inference::NewStub(
          grpc::CreateChannel(stage.system().router_address(), grpc::InsecureChannelCredentials()));
      const auto stream = stub->Generate(&context, request);
      ferry::v1::GenerateResponse message;
      while (stream->Read(&message)) {
      }
      stream->Finish();
    });
  }
  Hold(stage, random);
  for (std::thread& one : crowd) one.join();
}

void ReadSlowly(Stage& stage, std::mt19937_64& random) {
  const auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(stage.system().router_address(), grpc::InsecureChannelCredentials()));
  struct Reader {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<ferry::v1::GenerateResponse>> stream;
  };
  std::vector<std::unique_ptr<Reader>> readers;
  for (int i = 0; i < 4; ++i) {
    Ask ask = {MakePrompt(50, static_cast<uint32_t>(random()), 400), 500, 1 + random() % 1000};
    ferry::v1::GenerateRequest request = ToRequest(ask);
    request.mutable_sampling()->set_n(8);
    request.mutable_sampling()->set_logprobs(20);
    readers.push_back(std::make_unique<Reader>());
    readers.back()->stream = stub->Generate(&readers.back()->context, request);
  }
  Hold(stage, random);
  for (const auto& reader : readers) {
    reader->context.TryCancel();
    ferry::v1::GenerateResponse message;
    while (reader->stream->Read(&message)) {
    }
    reader->stream->Finish();
  }
}

}  // namespace

const std::vector<Fault>& LastingFaults() {
  static const auto* const faults = new std::vector<Fault>{
      {"the second prefill worker is killed and comes back at its address",
       [](Stage& s, std::mt19937_64&) { s.system().Restart(s.system().prefill(1)); }},
      {"the second decode worker is killed and comes back at its address",
       [](Stage& s, std::mt19937_64&) { s.system().Restart(s.system().decode(1)); }},
      {"a prefill worker stands still and goes on",
       [](Stage& s, std::mt19937_64& r) { StandStill(s, AnyPrefill(s, r), r); }},
      {"a decode worker stands still and goes on",
       [](Stage& s, std::mt19937_64& r) { StandStill(s, AnyDecode(s, r), r); }},
      {"a writer stands still in mid-transfer and goes on", StopWriter},
      {"a worker's link goes down and comes up", PullCable},
      {"packets between a prefill and a decode worker vanish", CutSomePair},
      {"1 to 10 % of a worker's packets are lost", LoseSome},
      {"calls to a worker are 20 to 120 ms late", Delay},
      {"calls to a worker hang half-open", HalfOpen},
      {"connections to a worker are reset",
       [](Stage& s, std::mt19937_64& r) { s.relay(AnyWorker(s, r)).Break(); }},
      {"more requests than the pools hold", FillPools},
      {"clients that do not read", ReadSlowly},
  };
  return *faults;
}

const std::vector<Fault>& AllFaults() {
  static const auto* const faults = [] {
    auto* const all = new std::vector<Fault>(LastingFaults());
    all->insert(all->end(),
                {{"the first prefill worker is killed and comes back at its address",
                  [](Stage& s, std::mt19937_64&) { s.system().Restart(s.system().prefill(0)); }},
                 {"the first decode worker is killed and comes back at its address",
                  [](Stage& s, std::mt19937_64&) { s.system().Restart(s.system().decode(0)); }},
                 {"the router is killed and comes back", RestartRouter}});
    return all;
  }();
  return *faults;
}

std::vector<Question> MixedQuestions(integration::SingleEngine& oracle) {
  const int32_t vocab = oracle.engine().network().config().vocab_size;
  const std::vector<int32_t> shared = MakePrompt(130, 4711, vocab);
  std::vector<Question> questions;
  for (uint32_t i = 0; i < 32; ++i) {
    Ask ask;
    ask.prompt = MakePrompt(1 + static_cast<int32_t>(i * 61 % 640), i, vocab);
    if (i % 4 == 0) ask.prompt.insert(ask.prompt.begin(), shared.begin(), shared.end());
    ask.max_tokens = 1 + static_cast<int32_t>(i * 37 % 90);
    ask.seed = i % 2 == 0 ? 0 : 100 + i;
    questions.push_back(MakeQuestion(oracle, ask, i % 8 == 7 ? 3 : 1));
  }
  return questions;
}

}  // namespace chaos

#include "tests/integration/fault_fixture.h"

#include <chrono>
#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"

namespace integration {
namespace {

std::string LongModel() { return std::getenv("FERRY_LONG_MODEL"); }

}  // namespace

SingleEngine& FaultTest::oracle() {
  static SingleEngine* oracle = new SingleEngine(LongModel());
  return *oracle;
}

std::vector<int32_t> FaultTest::Prompt(int32_t length, uint32_t salt) {
  return MakePrompt(length, salt, oracle().engine().network().config().vocab_size);
}

int32_t FaultTest::LongPromptTokens() {
  int32_t tokens = 4000;
  if (const char* text = std::getenv("FERRY_LONG_PROMPT_TOKENS")) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &tokens)) << text;
  }
  return tokens;
}

SystemOptions FaultTest::Options() {
  SystemOptions options;
  options.model_dir = LongModel();
  options.prefill_flags = {"--num_blocks", "400", "--num_threads", "1"};
  options.decode_flags = {"--num_blocks", "400", "--num_threads", "1"};
  options.router_flags = {"--local_prefill_tokens", "0"};
  return options;
}

FaultTest::Answer FaultTest::CompleteAsync(FerrySystem& system, const Ask& ask) {
  return std::async(std::launch::async,
                    [&system, ask] { return system.client().Complete(ToRequest(ask)); });
}

void FaultTest::ExpectRight(const absl::StatusOr<ferry::Client::Completion>& completion,
                            const Ask& ask) {
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
}

WorkerProcess* FaultTest::FindBusy(const std::vector<WorkerProcess*>& workers,
                                   const LoadCondition& busy, const Answer* until) {
  for (int round = 0; round < 200; ++round) {
    if (until != nullptr && until->wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      return nullptr;
    }
    for (WorkerProcess* worker : workers) {
      if (FerrySystem::WaitForLoad(*worker, busy, absl::Milliseconds(50))) return worker;
    }
  }
  return nullptr;
}

WorkerProcess* FaultTest::FindBusyPrefill(FerrySystem& system, int num_workers,
                                          const Answer* until) {
  std::vector<WorkerProcess*> workers;
  for (int i = 0; i < num_workers; ++i) workers.push_back(&system.prefill(i));
  return FindBusy(
      workers,
      [](const ferry::v1::LoadReport& load) {
        return load.waiting_tokens() > 0 &&
               load.waiting_tokens() < static_cast<uint64_t>(LongPromptTokens() - 100);
      },
      until);
}

WorkerProcess* FaultTest::FindBusyDecode(FerrySystem& system, int num_workers,
                                         const Answer* until) {
  std::vector<WorkerProcess*> workers;
  for (int i = 0; i < num_workers; ++i) workers.push_back(&system.decode(i));
  return FindBusy(
      workers, [](const ferry::v1::LoadReport& load) { return load.kv_blocks().reserved() > 0; },
      until);
}

}  // namespace integration

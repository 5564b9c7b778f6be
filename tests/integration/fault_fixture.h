// FaultTest: systems whose prompts take long enough to interfere with, and ways to find the worker
// that is in the middle of one.

#ifndef TESTS_INTEGRATION_FAULT_FIXTURE_H_
#define TESTS_INTEGRATION_FAULT_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "ferry/v1/worker.pb.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"
#include "tests/integration/single_engine.h"

namespace integration {

class FaultTest : public testing::Test {
 protected:
  using Answer = std::future<absl::StatusOr<ferry::Client::Completion>>;
  using LoadCondition = std::function<bool(const ferry::v1::LoadReport&)>;

  static SingleEngine& oracle();
  static std::vector<int32_t> Prompt(int32_t length, uint32_t salt);
  // Of a prompt that takes seconds; sanitized builds ask for a shorter one by
  // FERRY_LONG_PROMPT_TOKENS.
  static int32_t LongPromptTokens();
  // One worker of each kind, 400 blocks each, every prompt is prefilled remotely.
  static SystemOptions Options();

  static Answer CompleteAsync(FerrySystem& system, const Ask& ask);
  // OK, with the text of a single engine.
  static void ExpectRight(const absl::StatusOr<ferry::Client::Completion>& completion,
                          const Ask& ask);
  // The first of `workers` whose load `busy` accepts; null after a while, or when the answer is
  // there.
  static WorkerProcess* FindBusy(const std::vector<WorkerProcess*>& workers,
                                 const LoadCondition& busy, const Answer* until = nullptr);
  // The worker of this kind that is in the middle of a long prompt: it computes it, or has reserved
  // its blocks.
  static WorkerProcess* FindBusyPrefill(FerrySystem& system, int num_workers,
                                        const Answer* until = nullptr);
  static WorkerProcess* FindBusyDecode(FerrySystem& system, int num_workers,
                                       const Answer* until = nullptr);
};

}  // namespace integration

#endif  // TESTS_INTEGRATION_FAULT_FIXTURE_H_

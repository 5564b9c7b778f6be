// EdgeTest: one edge of the protocol (DESIGN.md 5) injected into a system whose prompts take long
// enough to interfere with; after each test the four promises.
//
// A test is named after the edge: E05_... is E5.

#ifndef TESTS_CHAOS_EDGE_FIXTURE_H_
#define TESTS_CHAOS_EDGE_FIXTURE_H_

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/chaos/report.h"
#include "tests/chaos/stage.h"
#include "tests/integration/fault_fixture.h"

namespace chaos {

class EdgeTest : public integration::FaultTest {
 protected:
  using Asked = std::future<Outcome>;

  // Workers of 100 blocks; prompts of more than 40 tokens are prefilled remotely.
  static StageOptions Workers(int num_prefill, int num_decode);
  void Start(const StageOptions& options);
  // Every request so far has kept to the promises, and what was in use has returned.
  void ExpectPromisesKept();
  void TearDown() override;

  integration::FerrySystem& system() { return stage_->system(); }
  Question Ask(int32_t prompt_tokens, uint32_t salt, int32_t max_tokens);
  // Takes seconds to prefill.
  Question LongPrompt(uint32_t salt) { return Ask(LongPromptTokens(), salt, 8); }
  // Takes seconds to decode.
  Question LongOutput(uint32_t salt) { return Ask(100, salt, 1000); }
  Asked Later(const Question& question, const Manner& manner = {});
  // One that an observer would not ask: `request` as it is.
  absl::Status Say(const ferry::v1::GenerateRequest& request, absl::Duration timeout);

  double Metric(const integration::WorkerProcess& worker, const std::string& name);
  double RouterMetric(const std::string& name);
  // Until `done`, looking again with every few reports; false after a while.
  bool WaitUntil(const std::function<bool()>& done);
  // The decode worker of which `load` is true of the reports; dies after a while without.
  integration::WorkerProcess* BusyDecode(const LoadCondition& load);

  std::unique_ptr<Stage> stage_;
  std::unique_ptr<Gauges> gauges_;
  Tally tally_;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_EDGE_FIXTURE_H_

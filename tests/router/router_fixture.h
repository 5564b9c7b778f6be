// A router in this process on port 0, over fake workers, and a client of it.

#ifndef TESTS_ROUTER_ROUTER_FIXTURE_H_
#define TESTS_ROUTER_ROUTER_FIXTURE_H_

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "router/generate_service.h"
#include "router/options.h"
#include "router/router.h"
#include "service/grpc_server.h"
#include "tests/fakes/fake_worker.h"

namespace router {

// What a client made of a stream.
struct Answer {
  absl::Status status;
  std::map<uint32_t, std::string> texts;  // by branch
  std::map<uint32_t, std::vector<uint32_t>> tokens;
  std::map<uint32_t, ferry::v1::FinishReason> reasons;
  std::vector<ferry::v1::PositionLogprobs> logprobs;  // of branch 0
  int num_summaries = 0;
  bool summary_was_last = false;
  ferry::v1::GenerateSummary summary;
};

// A Generate call on a thread of the test's own.
class RunningCall {
 public:
  RunningCall(ferry::v1::Inference::Stub* stub, ferry::v1::GenerateRequest request,
              absl::Duration timeout, bool read);
  ~RunningCall();
  Answer Wait() { return result_.get(); }
  void Cancel() { context_.TryCancel(); }
  int num_messages() const { return messages_; }

 private:
  grpc::ClientContext context_;
  std::atomic<int> messages_{0};
  std::future<Answer> result_;
};

// Fails the first `left` calls at any of the workers that share it.
struct Failing {
  std::atomic<int> left;
  absl::Status status;
};
void FailDecodes(fakes::FakeWorker* worker, Failing* failing, bool accept_first);
void FailPrefills(fakes::FakeWorker* worker, Failing* failing, bool start_first);

class RouterFixture : public testing::Test {
 protected:
  RouterFixture();
  ~RouterFixture() override;

  // Each worker gets a name; its address is known at once.
  fakes::FakeWorker* Add(ferry::v1::WorkerRole role);
  fakes::FakeWorker* Add(const fakes::FakeWorker::Options& options);
  fakes::FakeWorker* Prefill() { return Add(ferry::v1::WORKER_ROLE_PREFILL); }
  fakes::FakeWorker* Decode() { return Add(ferry::v1::WORKER_ROLE_DECODE); }
  // Starts the router over all workers added so far, and waits until it knows them.
  void StartRouter();
  // The same, without waiting.
  void StartRouterAlone();
  // Waits until ListModels counts these for the first model.
  bool WaitForWorkers(uint32_t prefill, uint32_t decode);
  // Evaluates on the router's loop until true; false after 20 s.
  bool Eventually(const std::function<bool()>& condition);

  static ferry::v1::GenerateRequest Text(const std::string& text, uint32_t max_tokens = 16);
  // A prompt of `n` tokens that starts with `first`.
  static ferry::v1::GenerateRequest Tokens(int n, uint32_t first = 1, uint32_t max_tokens = 16);
  ferry::v1::ListModelsResponse ListModels();
  Answer Generate(const ferry::v1::GenerateRequest& request,
                  absl::Duration timeout = absl::Seconds(30));
  std::unique_ptr<RunningCall> Start(const ferry::v1::GenerateRequest& request,
                                     absl::Duration timeout = absl::Seconds(30), bool read = true);
  // The block hashes of a request's prompt.
  std::vector<block_hash::BlockHash> ChainOf(const ferry::v1::GenerateRequest& request) const;
  // The value of a metric's line, as every port shows it; "" if it has none.
  std::string Metric(const std::string& name) const;
  // Nothing runs, waits or is charged any more.
  bool IsIdle();

  RouterOptions options_;
  std::vector<std::string> models_ = {"m"};
  fakes::FakeWorker::Directory directory_;
  std::vector<std::unique_ptr<fakes::FakeWorker>> workers_;
  std::shared_ptr<prometheus::Registry> metrics_ = std::make_shared<prometheus::Registry>();
  std::unique_ptr<Router> router_;
  std::unique_ptr<FrontDoor> door_;
  std::unique_ptr<GenerateService> service_;
  std::unique_ptr<service::GrpcServer> server_;
  // What the router told the health service last, and how it would explain that at that moment, as
  // its log does; belong to its loop.
  bool ready_ = false;
  absl::Status readiness_;
  std::unique_ptr<ferry::v1::Inference::Stub> stub_;
};

}  // namespace router

#endif  // TESTS_ROUTER_ROUTER_FIXTURE_H_

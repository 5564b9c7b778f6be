// DecodeServerTest: a whole decode worker in this process, spoken to over gRPC; its prefill worker
// is a client with an engine, a loopback link and a KvTransfer service that records.

#ifndef TESTS_DECODE_WORKER_SERVER_FIXTURE_H_
#define TESTS_DECODE_WORKER_SERVER_FIXTURE_H_

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "decode_worker/decode_server.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"
#include "tests/decode_worker/fake_engine.h"
#include "tests/decode_worker/harness.h"
#include "worker/request_spec.h"

namespace decode_worker {

using ferry::v1::DecodeEvent;
using ferry::v1::DecodeRequest;

// P's side of AbortTransfer.
class AbortRecorder final : public ferry::v1::KvTransfer::Service {
 public:
  grpc::Status AbortTransfer(grpc::ServerContext*, const ferry::v1::AbortTransferRequest* request,
                             ferry::v1::AbortTransferResponse* response) override {
    {
      std::lock_guard lock(mutex_);
      if (fail_next_-- > 0) return {grpc::StatusCode::UNAVAILABLE, "not now"};
      aborted_.push_back(request->key().request_id());
    }
    changed_.notify_all();
    response->set_writer_state(ferry::v1::WRITER_STATE_DRAINED);
    return grpc::Status::OK;
  }
  bool WaitFor(const std::string& request_id) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience), [&] {
      return std::count(aborted_.begin(), aborted_.end(), request_id) > 0;
    });
  }
  void FailNext(int times) {
    std::lock_guard lock(mutex_);
    fail_next_ = times;
  }

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<std::string> aborted_;
  int fail_next_ = 0;
};

struct Answer {
  grpc::Status status;
  bool accepted_first = false;
  std::map<uint32_t, std::vector<int32_t>> tokens;
  std::map<uint32_t, ferry::v1::FinishReason> finish;
  std::vector<ferry::v1::PositionLogprobs> logprobs;
  std::optional<ferry::v1::DecodeDone> done;
};

class DecodeServerTest : public ::testing::Test {
 protected:
  static constexpr int32_t kBlockSize = 64;

  DecodeServerTest() {
    options_.worker.listen = "127.0.0.1:0";
    options_.worker.handshake_timeout = absl::Seconds(5);
  }
  ~DecodeServerTest() override {
    server_.reset();
    prefill_.reset();
  }

  // `prepare` may change the runtime before the server starts on it.
  void Start(int32_t num_blocks = 64,
             const std::function<void(worker::WorkerRuntime&)>& prepare = nullptr);
  void StartPrefill();

  std::string epoch() const { return server_->runtime().epoch.ToBytes(); }
  ferry::v1::HandshakeRequest HandshakeRequest() { return HandshakeRequest(*prefill_); }
  ferry::v1::HandshakeRequest HandshakeRequest(FakePrefill& prefill);
  static void AddLinks(const kv_transfer::Transport& transport,
                       ferry::v1::HandshakeRequest* request);
  grpc::Status Handshake(const ferry::v1::HandshakeRequest& request);

  DecodeRequest Request(const std::string& id, int32_t length, int32_t max_tokens);
  DecodeRequest RemoteRequest(const std::string& id, int32_t length, int32_t max_tokens);

  Answer Run(const DecodeRequest& request) {
    grpc::ClientContext context;
    return Read(context, request);
  }
  Answer Read(grpc::ClientContext& context, const DecodeRequest& request,
              const std::function<void()>& on_accepted = nullptr);

  engine::SamplingOptions Sampling(const DecodeRequest& request) {
    return worker::ToSamplingOptions(request.spec().sampling(), 0);
  }
  std::vector<int32_t> Reference(const DecodeRequest& request, int32_t branch = 0);

  grpc::Status Reserve(const DecodeRequest& request, ferry::v1::ReserveResponse* response);
  // P's part of a request, whole.
  grpc::Status Push(const DecodeRequest& request);
  bool WaitIdle();

  DecodeOptions options_;
  std::shared_ptr<kv_transfer::LoopbackNetwork> network_;
  FakeEngine* engine_ = nullptr;
  int32_t num_blocks_ = 0;
  AbortRecorder recorder_;
  std::string prefill_host_ = "127.0.0.1";  // as the prefill worker tells it
  std::unique_ptr<service::GrpcServer> recorder_server_;
  std::unique_ptr<FakePrefill> prefill_;
  std::unique_ptr<DecodeServer> server_;
  std::unique_ptr<ferry::v1::DecodeWorker::Stub> decode_;
  std::unique_ptr<ferry::v1::KvTransfer::Stub> transfer_;
  std::unique_ptr<ferry::v1::Worker::Stub> worker_;
};

}  // namespace decode_worker

#endif  // TESTS_DECODE_WORKER_SERVER_FIXTURE_H_

// The gRPC side of a FakeWorker: its three services, the streams that are open, what was heard.

#ifndef TESTS_FAKES_FAKE_WORKER_SERVICES_H_
#define TESTS_FAKES_FAKE_WORKER_SERVICES_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/server_context.h"
#include "service/grpc_server.h"
#include "service/server_reactors.h"
#include "status/grpc_status.h"
#include "tests/fakes/fake_worker.h"

namespace fakes {

using namespace ferry::v1;  // NOLINT: a file of messages

constexpr double kPrefillTokensPerSecond = 100000;  // that GetInfo states

std::string KeyText(const RequestKey& key);

class FakeWorker::Services final : public Worker::CallbackService,
                                   public PrefillWorker::CallbackService,
                                   public DecodeWorker::CallbackService {
 public:
  explicit Services(FakeWorker* worker) : worker_(worker) {
    ticker_ = std::thread([this] { Tick(); });
  }

  void Start(int32_t port);
  int32_t port() const { return server_->port(); }

  void Stop();

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context, const GetInfoRequest*,
                                    WorkerInfo* info) override;

  grpc::ServerWriteReactor<LoadReport>* WatchLoad(grpc::CallbackServerContext*,
                                                  const WatchLoadRequest*) override;

  grpc::ServerWriteReactor<KvEventFrame>* WatchKvEvents(
      grpc::CallbackServerContext*, const WatchKvEventsRequest* request) override;

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const CancelRequest* request, CancelResponse*) override;

  grpc::ServerWriteReactor<PrefillEvent>* Prefill(grpc::CallbackServerContext*,
                                                  const PrefillRequest* request) override;

  grpc::ServerWriteReactor<DecodeEvent>* Decode(grpc::CallbackServerContext*,
                                                const DecodeRequest* request) override;

  grpc::ServerUnaryReactor* PushHeld(grpc::CallbackServerContext* context,
                                     const PushHeldRequest* request,
                                     PushHeldResponse* response) override;

  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context,
                                       const RenewLeaseRequest* request,
                                       RenewLeaseResponse* response) override;

  // Every stream must be ended once: when the router breaks it, or when the worker is killed.
  template <typename Stream>
  void EndAtStop(const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      stream->End(grpc::Status(grpc::UNAVAILABLE, "killed"));
      return;
    }
    enders_.push_back(
        [stream](const absl::Status& status) { stream->End(status::ToGrpc(status)); });
  }
  template <typename Call>
  void EndWhenBroken(const std::shared_ptr<Call>& call) {
    call->SetOnBroken([this, weak = std::weak_ptr<Call>(call)] {
      {
        std::lock_guard lock(mutex_);
        ++broken_;
      }
      if (const auto broken = weak.lock()) broken->End(absl::CancelledError("the router has gone"));
      worker_->Heard();
    });
    EndAtStop(call->stream());
  }

  // REQUIRES: mutex_ is held.
  void Report(const std::shared_ptr<service::OutboundStream<LoadReport>>& stream);
  void ReportAll();

  struct KvWatch {
    std::shared_ptr<service::OutboundStream<KvEventFrame>> stream;
    uint64_t sent;
  };
  // REQUIRES: mutex_ is held.
  void DropBrokenWatches();
  // REQUIRES: mutex_ is held.
  void SendKv(KvWatch* watch);

  void Tick();

  FakeWorker* const worker_;
  std::unique_ptr<service::GrpcServer> server_;
  std::thread ticker_;
  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool stopping_ = false;
  bool paused_ = false;
  LoadReport load_ = [] {
    LoadReport load;
    load.set_state(WORKER_STATE_SERVING);
    return load;
  }();
  uint64_t report_seq_ = 0;
  std::vector<grpc::ServerUnaryReactor*> silent_;
  std::vector<std::shared_ptr<service::OutboundStream<LoadReport>>> load_streams_;
  std::deque<KvWatch> kv_streams_;
  std::deque<KvEventFrame> frames_;
  std::vector<KvEvent> stored_;
  uint64_t last_seq_ = 0;
  uint64_t first_kept_ = 0;  // frames up to this one are forgotten
  bool skip_next_ = false;
  std::map<std::string, std::shared_ptr<DecodeCall>> open_decodes_;
  std::vector<std::function<void(const absl::Status&)>> enders_;
  std::vector<DecodeRequest> decodes_;
  std::vector<PrefillRequest> prefills_;
  std::vector<RequestKey> cancels_;
  std::vector<absl::Duration> cancel_limits_;
  std::vector<PushHeldRequest> pushes_;
  std::vector<uint64_t> kv_starts_;
  int renewals_ = 0;
  int broken_ = 0;
};

}  // namespace fakes

#endif  // TESTS_FAKES_FAKE_WORKER_SERVICES_H_

#include "tests/chaos/meddler.h"

#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "status/check.h"

namespace chaos {
namespace {

using grpc::ServerContext;
using grpc::ServerWriter;
using grpc::Status;
using namespace ferry::v1;  // NOLINT: every message of the protocol passes through here

constexpr int kMaxDelayMs = 60;

// What all services share: the way to the worker, and chance.
class Way {
 public:
  explicit Way(const std::string& target)
      : channel_(grpc::CreateChannel(target, grpc::InsecureChannelCredentials())) {}
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  int64_t num_repeated() const { return num_repeated_; }

  // Passes a unary call on: late by chance, and every other one twice.  The caller gets the answer
  // to one of the two.
  template <typename Stub, typename Request, typename Response>
  Status Pass(Stub& stub, Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              ServerContext* context, const Request& request, Response* response) {
    const int chance = Chance();
    const auto call = [&](int delay_ms, Response* answer) {
      absl::SleepFor(absl::Milliseconds(delay_ms));  // the fault itself: others overtake
      const auto on = grpc::ClientContext::FromServerContext(*context);
      return (stub.*method)(on.get(), request, answer);
    };
    if (chance % 2 == 0) return call(chance % kMaxDelayMs, response);
    ++num_repeated_;
    Response other;
    std::thread second([&] { call(chance / 64 % kMaxDelayMs, &other); });
    const Status status = call(chance % kMaxDelayMs, response);
    second.join();
    return status;
  }

  // Passes a stream on.
  template <typename Stub, typename Request, typename Message>
  Status Pass(Stub& stub,
              std::unique_ptr<grpc::ClientReader<Message>> (Stub::*method)(grpc::ClientContext*,
                                                                           const Request&),
              ServerContext* context, const Request& request, ServerWriter<Message>* writer) {
    const auto on = grpc::ClientContext::FromServerContext(*context);
    const auto stream = (stub.*method)(on.get(), request);
    Message message;
    while (stream->Read(&message)) {
      if (!writer->Write(message)) on->TryCancel();
    }
    return stream->Finish();
  }
  void CountRepeated() { ++num_repeated_; }

 private:
  int Chance() {
    std::lock_guard lock(mutex_);
    return static_cast<int>(random_() % (1 << 20));
  }
  const std::shared_ptr<grpc::Channel> channel_;
  std::atomic<int64_t> num_repeated_ = 0;
  std::mutex mutex_;  // guards random_
  std::mt19937 random_;
};

class WorkerCalls final : public Worker::Service {
 public:
  explicit WorkerCalls(Way* way) : way_(way), stub_(way->channel()) {}
  Status GetInfo(ServerContext* c, const GetInfoRequest* q, WorkerInfo* a) override {
    return way_->Pass(stub_, &Worker::Stub::GetInfo, c, *q, a);
  }
  Status Cancel(ServerContext* c, const CancelRequest* q, CancelResponse* a) override {
    return way_->Pass(stub_, &Worker::Stub::Cancel, c, *q, a);
  }
  Status WatchLoad(ServerContext* c, const WatchLoadRequest* q,
                   ServerWriter<LoadReport>* w) override {
    return way_->Pass(stub_, &Worker::Stub::WatchLoad, c, *q, w);
  }
  Status WatchKvEvents(ServerContext* c, const WatchKvEventsRequest* q,
                       ServerWriter<KvEventFrame>* w) override {
    return way_->Pass(stub_, &Worker::Stub::WatchKvEvents, c, *q, w);
  }

 private:
  Way* const way_;
  Worker::Stub stub_;
};

class DecodeCalls final : public DecodeWorker::Service {
 public:
  explicit DecodeCalls(Way* way) : way_(way), stub_(way->channel()) {}
  // The same request again, once it is known, is refused and disturbs nothing.
  Status Decode(ServerContext* c, const DecodeRequest* q, ServerWriter<DecodeEvent>* w) override {
    const auto on = grpc::ClientContext::FromServerContext(*c);
    const auto stream = stub_.Decode(on.get(), *q);
    DecodeEvent event;
    for (bool first = true; stream->Read(&event); first = false) {
      if (!w->Write(event)) on->TryCancel();
      if (!first) continue;
      way_->CountRepeated();
      grpc::ClientContext again;
      const auto refused = stub_.Decode(&again, *q);
      FERRY_CHECK(!refused->Read(&event)) << "a request runs twice: " << event.ShortDebugString();
      const Status status = refused->Finish();
      FERRY_CHECK(!status.ok()) << "a request ran twice";
    }
    return stream->Finish();
  }

 private:
  Way* const way_;
  DecodeWorker::Stub stub_;
};

class TransferCalls final : public KvTransfer::Service {
 public:
  explicit TransferCalls(Way* way) : way_(way), stub_(way->channel()) {}
  Status Handshake(ServerContext* c, const HandshakeRequest* q, HandshakeResponse* a) override {
    return way_->Pass(stub_, &KvTransfer::Stub::Handshake, c, *q, a);
  }
  Status Reserve(ServerContext* c, const ReserveRequest* q, ReserveResponse* a) override {
    return way_->Pass(stub_, &KvTransfer::Stub::Reserve, c, *q, a);
  }
  Status TransferDone(ServerContext* c, const TransferDoneRequest* q,
                      TransferDoneResponse* a) override {
    return way_->Pass(stub_, &KvTransfer::Stub::TransferDone, c, *q, a);
  }
  Status Release(ServerContext* c, const ReleaseRequest* q, ReleaseResponse* a) override {
    return way_->Pass(stub_, &KvTransfer::Stub::Release, c, *q, a);
  }
  Status AbortTransfer(ServerContext* c, const AbortTransferRequest* q,
                       AbortTransferResponse* a) override {
    return way_->Pass(stub_, &KvTransfer::Stub::AbortTransfer, c, *q, a);
  }

 private:
  Way* const way_;
  KvTransfer::Stub stub_;
};

class MeddlerImpl final : public Meddler {
 public:
  MeddlerImpl(const std::string& ip, const std::string& target)
      : way_(target), worker_(&way_), decode_(&way_), transfer_(&way_) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(ip + ":0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&worker_);
    builder.RegisterService(&decode_);
    builder.RegisterService(&transfer_);
    server_ = builder.BuildAndStart();
    FERRY_CHECK(server_ != nullptr) << "cannot listen on " << ip;
    address_ = absl::StrCat(ip, ":", port);
  }
  ~MeddlerImpl() override { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& address() const override { return address_; }
  int64_t num_repeated() const override { return way_.num_repeated(); }

 private:
  Way way_;
  WorkerCalls worker_;
  DecodeCalls decode_;
  TransferCalls transfer_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace

std::unique_ptr<Meddler> Meddler::Start(const std::string& ip, const std::string& target) {
  return std::make_unique<MeddlerImpl>(ip, target);
}

}  // namespace chaos

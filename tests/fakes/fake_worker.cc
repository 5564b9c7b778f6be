#include "tests/fakes/fake_worker.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/server_context.h"
#include "service/grpc_server.h"
#include "service/server_reactors.h"
#include "status/check.h"
#include "status/grpc_status.h"

namespace fakes {
namespace {

using namespace ferry::v1;  // NOLINT: a file of messages

constexpr auto kTick = std::chrono::milliseconds(20);
constexpr auto kPatience = std::chrono::seconds(20);

std::string NewEpoch() {
  static std::atomic<int> count{0};
  std::string epoch = absl::StrCat("epoch-", ++count);
  epoch.resize(16, '.');
  return epoch;
}

std::string KeyText(const RequestKey& key) {
  return absl::StrCat(key.request_id(), "/", key.attempt());
}

template <typename Call, typename Request, typename Event>
class CallOver final : public Call {
 public:
  explicit CallOver(const Request& request)
      : Call(request),
        on_broken_(std::make_shared<std::function<void()>>()),
        stream_(
            service::OutboundStream<Event>::Create([on_broken = on_broken_] { (*on_broken)(); })) {}
  // Before the call is given to gRPC.
  void SetOnBroken(std::function<void()> on_broken) { *on_broken_ = std::move(on_broken); }
  void Push(const Event& event) override { stream_->Push(event); }
  void End(const absl::Status& status) override { stream_->End(status::ToGrpc(status)); }
  bool broken() const override { return stream_->broken(); }
  const std::shared_ptr<service::OutboundStream<Event>>& stream() const { return stream_; }

 private:
  const std::shared_ptr<std::function<void()>> on_broken_;
  const std::shared_ptr<service::OutboundStream<Event>> stream_;
};

}  // namespace

void DecodeCall::Accept() {
  DecodeEvent event;
  event.mutable_accepted();
  Push(event);
}

void DecodeCall::Tokens(uint32_t branch, const std::string& bytes, FinishReason finish) {
  DecodeEvent event;
  DecodeTokens* tokens = event.mutable_tokens();
  tokens->set_branch(branch);
  for (const char c : bytes) {
    tokens->add_token_ids(static_cast<uint8_t>(c));
    if (request.spec().sampling().num_logprobs() < 0) continue;
    PositionLogprobs* position = tokens->add_logprobs();
    position->mutable_chosen()->set_token_id(static_cast<uint8_t>(c));
    position->mutable_chosen()->set_logprob(-0.5f);
    for (int i = 0; i < request.spec().sampling().num_logprobs(); ++i) {
      position->add_top()->set_token_id('A' + i);
    }
  }
  tokens->set_finish_reason(finish);
  Push(event);
}

void DecodeCall::Done(uint32_t cached_tokens) {
  DecodeEvent event;
  event.mutable_done()->set_cached_tokens(cached_tokens);
  Push(event);
}

void DecodeCall::Answer(const std::string& bytes, FinishReason finish) {
  for (uint32_t branch = 0; branch < request.spec().sampling().n(); ++branch) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      Tokens(branch, bytes.substr(i, 1),
             i + 1 == bytes.size() ? finish : FINISH_REASON_UNSPECIFIED);
    }
  }
  Done();
  End(absl::OkStatus());
}

void PrefillCall::Accept() {
  PrefillEvent event;
  event.mutable_accepted();
  Push(event);
}
void PrefillCall::Started() {
  PrefillEvent event;
  event.mutable_started();
  Push(event);
}
void PrefillCall::Held(absl::Duration lease) {
  PrefillEvent event;
  event.mutable_held()->set_lease_ms(absl::ToInt64Milliseconds(lease));
  event.mutable_held()->set_cause("no room");
  Push(event);
}
void PrefillCall::Done() {
  PrefillEvent event;
  PrefillDone* done = event.mutable_done();
  done->set_computed_tokens(request.spec().token_ids_size());
  done->set_kv_bytes(1000);
  done->set_kv_blocks(2);
  done->set_transport("fake");
  done->set_transfer_ms(1.5);
  Push(event);
}

class FakeWorker::Services final : public Worker::CallbackService,
                                   public PrefillWorker::CallbackService,
                                   public DecodeWorker::CallbackService {
 public:
  explicit Services(FakeWorker* worker) : worker_(worker) {
    ticker_ = std::thread([this] { Tick(); });
  }

  void Start(int32_t port) {
    auto started = service::GrpcServer::Start(absl::StrCat("127.0.0.1:", port), {},
                                              {static_cast<Worker::CallbackService*>(this),
                                               static_cast<PrefillWorker::CallbackService*>(this),
                                               static_cast<DecodeWorker::CallbackService*>(this)});
    FERRY_CHECK(started.ok()) << started.status();
    server_ = std::move(*started);
  }
  int32_t port() const { return server_->port(); }

  void Stop() {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      stopping_ = true;
      open_decodes_.clear();
    }
    changed_.notify_all();
    ticker_.join();
    std::vector<std::function<void(const absl::Status&)>> enders;
    {
      std::lock_guard lock(mutex_);
      enders.swap(enders_);
    }
    for (const auto& end : enders) end(absl::UnavailableError("killed"));
    server_->Shutdown(absl::ZeroDuration());
  }

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context, const GetInfoRequest*,
                                    WorkerInfo* info) override {
    const Options& options = worker_->options_;
    info->set_epoch(worker_->epoch_);
    info->set_role(options.role);
    info->set_state(WORKER_STATE_SERVING);
    info->set_model(options.model);
    info->set_tokenizer_hash(options.tokenizer_hash);
    info->mutable_layout()->set_block_size(options.block_size);
    for (const std::string& link : options.links) info->add_transports(link);
    info->set_host_id(options.host_id);
    info->set_block_size(options.block_size);
    info->set_block_bytes(1000);
    info->set_num_blocks(options.num_blocks);
    info->set_num_state_slots(options.num_state_slots);
    info->set_max_seqs(options.max_seqs);
    info->set_max_model_len(options.max_model_len);
    info->set_hash_seed(options.hash_seed);
    info->set_prefill_tokens_per_s(100000);
    info->set_decode_step_ms(1);
    info->set_decode_step_ms_per_seq(0.1);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::lock_guard lock(mutex_);
    // A stopped process answers nothing; the caller's deadline passes.
    if (paused_) {
      silent_.push_back(reactor);
    } else {
      reactor->Finish(grpc::Status::OK);
    }
    return reactor;
  }

  grpc::ServerWriteReactor<LoadReport>* WatchLoad(grpc::CallbackServerContext*,
                                                  const WatchLoadRequest*) override {
    auto stream = service::OutboundStream<LoadReport>::Create([] {});
    EndAtStop(stream);
    std::lock_guard lock(mutex_);
    load_streams_.push_back(stream);
    Report(stream);
    return stream.get();
  }

  grpc::ServerWriteReactor<KvEventFrame>* WatchKvEvents(
      grpc::CallbackServerContext*, const WatchKvEventsRequest* request) override {
    auto stream = service::OutboundStream<KvEventFrame>::Create([] {});
    EndAtStop(stream);
    std::lock_guard lock(mutex_);
    kv_starts_.push_back(request->from_seq());
    kv_streams_.push_back({stream, 0});
    if (request->from_seq() <= first_kept_ && last_seq_ > 0 && first_kept_ > 0) {
      KvEventFrame frame;
      frame.set_epoch(worker_->epoch_);
      frame.set_seq(last_seq_);
      frame.set_snapshot(true);
      frame.set_snapshot_end(true);
      for (const auto& event : stored_) *frame.add_events() = event;
      stream->Push(frame);
      kv_streams_.back().sent = last_seq_;
    } else {
      kv_streams_.back().sent = request->from_seq() > 0 ? request->from_seq() - 1 : 0;
      SendKv(&kv_streams_.back());
    }
    worker_->Heard();
    return stream.get();
  }

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const CancelRequest* request, CancelResponse*) override {
    {
      std::lock_guard lock(mutex_);
      cancels_.push_back(request->key());
      cancel_limits_.push_back(absl::FromChrono(context->deadline()) - absl::Now());
      open_decodes_.erase(KeyText(request->key()));
    }
    worker_->Heard();
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerWriteReactor<PrefillEvent>* Prefill(grpc::CallbackServerContext*,
                                                  const PrefillRequest* request) override {
    auto call = std::make_shared<CallOver<PrefillCall, PrefillRequest, PrefillEvent>>(*request);
    {
      std::lock_guard lock(mutex_);
      prefills_.push_back(*request);
    }
    EndWhenBroken(call);
    if (worker_->on_prefill) {
      worker_->on_prefill(call);
    } else {
      worker_->DefaultPrefill(call);
    }
    worker_->Heard();
    return call->stream().get();
  }

  grpc::ServerWriteReactor<DecodeEvent>* Decode(grpc::CallbackServerContext*,
                                                const DecodeRequest* request) override {
    auto call = std::make_shared<CallOver<DecodeCall, DecodeRequest, DecodeEvent>>(*request);
    {
      std::lock_guard lock(mutex_);
      decodes_.push_back(*request);
    }
    EndWhenBroken(call);
    if (worker_->on_decode) {
      worker_->on_decode(call);
    } else {
      worker_->DefaultDecode(call);
    }
    worker_->Heard();
    return call->stream().get();
  }

  grpc::ServerUnaryReactor* PushHeld(grpc::CallbackServerContext* context,
                                     const PushHeldRequest* request,
                                     PushHeldResponse* response) override {
    {
      std::lock_guard lock(mutex_);
      pushes_.push_back(*request);
    }
    absl::Status status;
    if (worker_->on_push_held) {
      status = worker_->on_push_held(*request);
    } else {
      RequestKey key;
      key.set_request_id(request->request_id());
      key.set_attempt(request->attempt());
      FakeWorker* const decode = worker_->directory_->at(request->decode().address());
      if (!decode->Deliver(key)) status = absl::AbortedError("no decode is open");
    }
    response->mutable_done()->set_kv_bytes(2000);
    response->mutable_done()->set_transport("fake-held");
    worker_->Heard();
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(status::ToGrpc(status));
    return reactor;
  }

  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context,
                                       const RenewLeaseRequest* request,
                                       RenewLeaseResponse* response) override {
    {
      std::lock_guard lock(mutex_);
      ++renewals_;
    }
    const absl::Status status = worker_->on_renew ? worker_->on_renew(*request) : absl::OkStatus();
    response->set_lease_ms(300);
    worker_->Heard();
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(status::ToGrpc(status));
    return reactor;
  }

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
  void Report(const std::shared_ptr<service::OutboundStream<LoadReport>>& stream) {
    if (paused_) return;
    LoadReport report = load_;
    report.set_epoch(worker_->epoch_);
    report.set_seq(++report_seq_);
    stream->Push(report);
  }
  void ReportAll() {
    for (const auto& stream : load_streams_) Report(stream);
  }

  struct KvWatch {
    std::shared_ptr<service::OutboundStream<KvEventFrame>> stream;
    uint64_t sent;
  };
  // REQUIRES: mutex_ is held.
  void DropBrokenWatches() {
    std::erase_if(kv_streams_, [](const KvWatch& watch) {
      if (!watch.stream->broken()) return false;
      watch.stream->End(grpc::Status::CANCELLED);
      return true;
    });
  }
  // REQUIRES: mutex_ is held.
  void SendKv(KvWatch* watch) {
    for (const KvEventFrame& frame : frames_) {
      if (frame.seq() > watch->sent) {
        watch->stream->Push(frame);
        watch->sent = frame.seq();
      }
    }
  }

  void Tick() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      changed_.wait_for(lock, kTick, [this] { return stopping_; });
      if (stopping_ || paused_) continue;
      ReportAll();
      DropBrokenWatches();
      for (KvWatch& watch : kv_streams_) {
        KvEventFrame beat;
        beat.set_epoch(worker_->epoch_);
        beat.set_seq(watch.sent);
        beat.set_heartbeat(true);
        watch.stream->Push(beat);
      }
    }
    for (grpc::ServerUnaryReactor* reactor : silent_) {
      reactor->Finish(grpc::Status(grpc::UNAVAILABLE, "killed"));
    }
  }

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

FakeWorker::FakeWorker(const Options& options, Directory* directory)
    : options_(options), directory_(directory), epoch_(NewEpoch()) {
  services_ = std::make_unique<Services>(this);
  services_->Start(options.port);
  port_ = services_->port();
  address_ = absl::StrCat("127.0.0.1:", port_);
  (*directory_)[address_] = this;
}

FakeWorker::~FakeWorker() { Kill(); }
void FakeWorker::Kill() { services_->Stop(); }

void FakeWorker::DefaultDecode(const std::shared_ptr<DecodeCall>& call) {
  call->Accept();
  if (call->request.local_prefill()) {
    call->Answer(output);
    return;
  }
  std::lock_guard lock(services_->mutex_);
  services_->open_decodes_[KeyText(call->request.spec().key())] = call;
}

void FakeWorker::DefaultPrefill(const std::shared_ptr<PrefillCall>& call) {
  call->Accept();
  call->Started();
  FakeWorker* const decode = directory_->at(call->request.decode().address());
  if (!decode->Deliver(call->request.spec().key())) {
    call->End(absl::AbortedError("no decode is open for the request"));
    return;
  }
  call->Done();
  call->End(absl::OkStatus());
}

bool FakeWorker::Deliver(const RequestKey& key) {
  std::shared_ptr<DecodeCall> call;
  {
    std::lock_guard lock(services_->mutex_);
    const auto it = services_->open_decodes_.find(KeyText(key));
    if (it == services_->open_decodes_.end()) return false;
    call = it->second;
    services_->open_decodes_.erase(it);
  }
  call->Answer(output);
  return true;
}

void FakeWorker::SetLoad(uint64_t waiting_tokens, uint32_t running, uint32_t used_blocks) {
  std::lock_guard lock(services_->mutex_);
  services_->load_.set_waiting_tokens(waiting_tokens);
  services_->load_.set_running_requests(running);
  services_->load_.mutable_kv_blocks()->set_active(used_blocks);
  services_->ReportAll();
}

void FakeWorker::SetState(WorkerState state) {
  std::lock_guard lock(services_->mutex_);
  services_->load_.set_state(state);
  services_->ReportAll();
}

void FakeWorker::PauseReports(bool paused) {
  std::lock_guard lock(services_->mutex_);
  services_->paused_ = paused;
}

void FakeWorker::Store(const std::vector<block_hash::BlockHash>& chain) {
  std::lock_guard lock(services_->mutex_);
  KvEventFrame frame;
  frame.set_epoch(epoch_);
  frame.set_seq(++services_->last_seq_);
  for (const auto& hash : chain) {
    KvEvent event;
    event.mutable_stored()->set_hash(std::string(hash.view()));
    *frame.add_events() = event;
    services_->stored_.push_back(event);
  }
  services_->frames_.push_back(frame);
  services_->DropBrokenWatches();
  for (auto& watch : services_->kv_streams_) {
    if (std::exchange(services_->skip_next_, false)) watch.sent = frame.seq();
    services_->SendKv(&watch);
  }
}

void FakeWorker::SkipFrame() {
  std::lock_guard lock(services_->mutex_);
  services_->skip_next_ = true;
}

void FakeWorker::ForgetLog() {
  std::lock_guard lock(services_->mutex_);
  services_->frames_.clear();
  services_->first_kept_ = services_->last_seq_;
}

std::vector<DecodeRequest> FakeWorker::decodes() const {
  std::lock_guard lock(services_->mutex_);
  return services_->decodes_;
}
std::vector<PrefillRequest> FakeWorker::prefills() const {
  std::lock_guard lock(services_->mutex_);
  return services_->prefills_;
}
std::vector<absl::Duration> FakeWorker::cancel_limits() const {
  std::lock_guard lock(services_->mutex_);
  return services_->cancel_limits_;
}

std::vector<RequestKey> FakeWorker::cancels() const {
  std::lock_guard lock(services_->mutex_);
  return services_->cancels_;
}
std::vector<PushHeldRequest> FakeWorker::pushes() const {
  std::lock_guard lock(services_->mutex_);
  return services_->pushes_;
}
int FakeWorker::num_renewals() const {
  std::lock_guard lock(services_->mutex_);
  return services_->renewals_;
}
int FakeWorker::num_broken() const {
  std::lock_guard lock(services_->mutex_);
  return services_->broken_;
}
std::vector<uint64_t> FakeWorker::kv_watch_starts() const {
  std::lock_guard lock(services_->mutex_);
  return services_->kv_starts_;
}

void FakeWorker::Heard() { services_->changed_.notify_all(); }

bool FakeWorker::WaitFor(const std::function<bool()>& condition) const {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    std::unique_lock lock(services_->mutex_);
    // The condition may be about another worker: look again at every tick as well.
    services_->changed_.wait_for(lock, kTick);
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

}  // namespace fakes

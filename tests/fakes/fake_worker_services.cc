#include "tests/fakes/fake_worker_services.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "status/check.h"

namespace fakes {
namespace {

constexpr auto kTick = std::chrono::milliseconds(20);

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

std::string KeyText(const RequestKey& key) {
  return absl::StrCat(key.request_id(), "/", key.attempt());
}

void FakeWorker::Services::Start(int32_t port) {
  auto started = service::GrpcServer::Start(absl::StrCat("127.0.0.1:", port), {},
                                            {static_cast<Worker::CallbackService*>(this),
                                             static_cast<PrefillWorker::CallbackService*>(this),
                                             static_cast<DecodeWorker::CallbackService*>(this)});
  FERRY_CHECK(started.ok()) << started.status();
  server_ = std::move(*started);
}

void FakeWorker::Services::Stop() {
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

grpc::ServerUnaryReactor* FakeWorker::Services::GetInfo(grpc::CallbackServerContext* context,
                                                        const GetInfoRequest*, WorkerInfo* info) {
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
  info->set_prefill_tokens_per_s(kPrefillTokensPerSecond);
  info->set_decode_step_ms(1);
  info->set_decode_step_ms_per_seq(0.1);
  if (worker_->on_info != nullptr) worker_->on_info(info);
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

grpc::ServerWriteReactor<LoadReport>* FakeWorker::Services::WatchLoad(grpc::CallbackServerContext*,
                                                                      const WatchLoadRequest*) {
  auto stream = service::OutboundStream<LoadReport>::Create([] {});
  EndAtStop(stream);
  std::lock_guard lock(mutex_);
  load_streams_.push_back(stream);
  Report(stream);
  return stream.get();
}

grpc::ServerWriteReactor<KvEventFrame>* FakeWorker::Services::WatchKvEvents(
    grpc::CallbackServerContext*, const WatchKvEventsRequest* request) {
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

grpc::ServerUnaryReactor* FakeWorker::Services::Cancel(grpc::CallbackServerContext* context,
                                                       const CancelRequest* request,
                                                       CancelResponse*) {
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

grpc::ServerWriteReactor<PrefillEvent>* FakeWorker::Services::Prefill(
    grpc::CallbackServerContext*, const PrefillRequest* request) {
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

grpc::ServerWriteReactor<DecodeEvent>* FakeWorker::Services::Decode(grpc::CallbackServerContext*,
                                                                    const DecodeRequest* request) {
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

grpc::ServerUnaryReactor* FakeWorker::Services::PushHeld(grpc::CallbackServerContext* context,
                                                         const PushHeldRequest* request,
                                                         PushHeldResponse* response) {
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

grpc::ServerUnaryReactor* FakeWorker::Services::RenewLease(grpc::CallbackServerContext* context,
                                                           const RenewLeaseRequest* request,
                                                           RenewLeaseResponse* response) {
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

void FakeWorker::Services::Report(
    const std::shared_ptr<service::OutboundStream<LoadReport>>& stream) {
  if (paused_) return;
  LoadReport report = load_;
  report.set_epoch(worker_->epoch_);
  report.set_seq(++report_seq_);
  if (worker_->on_report != nullptr) worker_->on_report(&report);
  stream->Push(report);
}

void FakeWorker::Services::ReportAll() {
  for (const auto& stream : load_streams_) Report(stream);
}

void FakeWorker::Services::DropBrokenWatches() {
  std::erase_if(kv_streams_, [](const KvWatch& watch) {
    if (!watch.stream->broken()) return false;
    watch.stream->End(grpc::Status::CANCELLED);
    return true;
  });
}

void FakeWorker::Services::SendKv(KvWatch* watch) {
  for (const KvEventFrame& frame : frames_) {
    if (frame.seq() > watch->sent) {
      watch->stream->Push(frame);
      watch->sent = frame.seq();
    }
  }
}

void FakeWorker::Services::Tick() {
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

}  // namespace fakes

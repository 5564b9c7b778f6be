#include "worker/worker_service.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "service/server_reactors.h"
#include "steady_time/steady_time.h"
#include "worker/watch_streams.h"

namespace worker {
namespace {

using ferry::v1::Worker;

constexpr absl::Duration kDefaultLoadInterval = absl::Milliseconds(500);
constexpr absl::Duration kMinLoadInterval = absl::Milliseconds(10);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);

class Service final : public Worker::CallbackService, public WorkerService {
 public:
  Service(WorkerControl* control, const KvEventLog* events, const std::string& epoch)
      : control_(control), events_(events), epoch_(epoch) {
    drain_member_ = ticker_.Add([this](absl::Time now) { return CheckDrains(now); });
  }
  ~Service() override { ticker_.Remove(drain_member_); }

  grpc::Service* grpc_service() override { return this; }

  void NotifyLoadChanged() override { ticker_.Wake(); }

  void Stop() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (LoadWatch* watch : load_watches_) watch->Stop();
    for (KvEventWatch* watch : event_watches_) watch->Stop();
    for (const PendingDrain& drain : drains_) Answer(drain);
    drains_.clear();
  }

 private:
  struct PendingDrain {
    std::shared_ptr<service::DeferredReply> reply;
    ferry::v1::DrainResponse* response;
    absl::Time limit;
  };

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const ferry::v1::GetInfoRequest*,
                                    ferry::v1::WorkerInfo* response) override {
    control_->FillInfo(response);
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const ferry::v1::CancelRequest* request,
                                   ferry::v1::CancelResponse* response) override {
    response->set_found(control_->Cancel({request->key().request_id(), request->key().attempt()},
                                         request->reason()));
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerWriteReactor<ferry::v1::LoadReport>* WatchLoad(
      grpc::CallbackServerContext*, const ferry::v1::WatchLoadRequest* request) override {
    const absl::Duration interval =
        request->interval_ms() == 0
            ? kDefaultLoadInterval
            : std::max(absl::Milliseconds(request->interval_ms()), kMinLoadInterval);
    auto* watch = new LoadWatch(control_, &ticker_, interval, [this](LoadWatch* done) {
      const std::lock_guard<std::mutex> lock(mutex_);
      load_watches_.erase(done);
    });
    return Started(watch, load_watches_);
  }

  grpc::ServerWriteReactor<ferry::v1::KvEventFrame>* WatchKvEvents(
      grpc::CallbackServerContext*, const ferry::v1::WatchKvEventsRequest* request) override {
    // Numbers of another process mean nothing here: everything is told from the start.
    const uint64_t from_seq = request->epoch() == epoch_ ? request->from_seq() : 0;
    auto* watch = new KvEventWatch(events_, &ticker_, epoch_, from_seq, [this](KvEventWatch* done) {
      const std::lock_guard<std::mutex> lock(mutex_);
      event_watches_.erase(done);
    });
    return Started(watch, event_watches_);
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext*,
                                  const ferry::v1::DrainRequest* request,
                                  ferry::v1::DrainResponse* response) override {
    control_->StartDrain();
    auto reply = service::DeferredReply::Create(nullptr);
    PendingDrain drain{reply, response,
                       request->limit_ms() == 0
                           ? absl::InfiniteFuture()
                           : steady_time::Now() + absl::Milliseconds(request->limit_ms())};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) {
        Answer(drain);
      } else {
        drains_.push_back(std::move(drain));
      }
    }
    ticker_.Wake();
    return reply.get();
  }

  template <typename Watch>
  Watch* Started(Watch* watch, absl::flat_hash_set<Watch*>& watches) {
    watch->Start();  // takes the ticker's lock, under which mutex_ is taken
    const std::lock_guard<std::mutex> lock(mutex_);
    watches.insert(watch);
    if (stopped_) watch->Stop();
    return watch;
  }

  void Answer(const PendingDrain& drain) const {
    const WorkerControl::Remaining remaining = control_->remaining();
    drain.reply->Reply(grpc::Status::OK, [&] {
      drain.response->set_remaining_requests(remaining.requests);
      drain.response->set_remaining_held_blocks(remaining.held_blocks);
    });
  }

  absl::Time CheckDrains(absl::Time now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (drains_.empty()) return absl::InfiniteFuture();
    const WorkerControl::Remaining remaining = control_->remaining();
    const bool drained = remaining.requests == 0 && remaining.held_blocks == 0;
    std::vector<PendingDrain> waiting;
    for (PendingDrain& drain : drains_) {
      if (drained || drain.limit <= now || drain.reply->cancelled()) {
        Answer(drain);
      } else {
        waiting.push_back(std::move(drain));
      }
    }
    drains_ = std::move(waiting);
    return drains_.empty() ? absl::InfiniteFuture() : now + kDrainPoll;
  }

  WorkerControl* const control_;
  const KvEventLog* const events_;
  const std::string epoch_;
  Ticker ticker_;
  int64_t drain_member_ = 0;

  std::mutex mutex_;  // guards everything below
  bool stopped_ = false;
  absl::flat_hash_set<LoadWatch*> load_watches_;
  absl::flat_hash_set<KvEventWatch*> event_watches_;
  std::vector<PendingDrain> drains_;
};

}  // namespace

std::unique_ptr<WorkerService> CreateWorkerService(WorkerControl* control, const KvEventLog* events,
                                                   const std::string& epoch) {
  return std::make_unique<Service>(control, events, epoch);
}

}  // namespace worker

// WorkerLink: the router's view of one worker address: who is there (GetInfo), how loaded it is
// (WatchLoad), what it has cached (WatchKvEvents), and whether it is alive.
//
//   connecting ── GetInfo, first report ──► serving ◄──► draining
//                     ▲                       │ 3 heartbeats missed, or WatchLoad broke
//                     │                       ▼
//                     └──── back-off ──── suspect ── 5 missed, or GetInfo failed ──► dead ──
//                     back-off ─►
//
// A worker whose name no longer leads to this address leaves: as if it drained, whatever it says
// itself; what runs there goes on.  Then the link is removed: gone, for good.
//
// A process that comes back under another epoch is another worker: the listener hears that the old
// one is dead before anything of the new one is seen.
//
// Owned by the loop's thread.

#ifndef ROUTER_WORKER_LINK_H_
#define ROUTER_WORKER_LINK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/event_loop.h"
#include "router/prefix_index.h"
#include "router/worker_client.h"
#include "router/worker_view.h"

namespace router {

enum class LinkState { kConnecting, kServing, kDraining, kSuspect, kDead, kGone };
const char* LinkStateName(LinkState state);

class WorkerLink final {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // State, facts or load changed.
    virtual void OnWorkerChanged(WorkerLink* link) = 0;
    // A load report was taken in.
    virtual void OnLoadReport(WorkerLink* link) = 0;
    // The life `epoch` of this worker is over: what runs there is lost.
    virtual void OnWorkerLost(WorkerLink* link, const std::string& epoch,
                              const absl::Status& cause) = 0;
  };
  struct Options {
    std::string address;
    service::TlsOptions tls;
    absl::Duration heartbeat = absl::Seconds(1);
    absl::Duration cancel_ack = absl::Seconds(1);
    uint64_t hash_seed = 0;  // with another one the worker's block hashes mean nothing here
  };

  // Everything must outlive the link.
  WorkerLink(WorkerSlot slot, const Options& options, EventLoop* loop,
             std::shared_ptr<OutstandingCalls> outstanding, PrefixIndex* index, Listener* listener);
  ~WorkerLink();

  void Start();
  // Closes every stream; nothing is reported any more.
  void Stop();

  // Nothing new goes there, until it may stay.
  void Leave();
  void Stay();
  bool leaving() const { return leaving_; }
  // Stops; nobody is known there any more.  REQUIRES: nothing of ours runs there.
  void Remove();

  WorkerSlot slot() const { return slot_; }
  const std::string& address() const { return options_.address; }
  LinkState state() const { return state_; }
  const WorkerFacts& facts() const { return facts_; }
  // Its blocks' names mean here what they mean there.
  bool shares_hashes() const { return facts_.hash_seed == options_.hash_seed; }
  const WorkerLoad& load() const { return load_; }
  // Why nobody answers GetInfo there; OK after an answer, and before the first try has ended.
  const absl::Status& trouble() const { return trouble_; }
  // Why it was held for suspect or dead last.
  const absl::Status& doubt() const { return doubt_; }
  // For RPCs to the worker; shared with the requests that run there, which may outlive a
  // reconnection.
  const std::shared_ptr<WorkerClient>& client() const { return client_; }

 private:
  void Connect();  // over new channels
  void Ask();      // who is there
  void OnInfo(absl::StatusOr<ferry::v1::WorkerInfo> info);
  void OnLoad(const ferry::v1::LoadReport& report);
  void OpenKvEvents();
  void OnKvFrame(const ferry::v1::KvEventFrame& frame);
  void Suspect(const absl::Status& cause);
  void Broken(const absl::Status& cause);
  void Lost(const absl::Status& cause);
  void ReconnectLater();
  void CheckHeartbeat();
  void SetState(LinkState state);
  // Serving or draining, as it is now.
  void SetAvailability();
  void CloseStreams();

  const WorkerSlot slot_;
  const Options options_;
  EventLoop* const loop_;
  const std::shared_ptr<OutstandingCalls> outstanding_;
  PrefixIndex* const index_;
  Listener* const listener_;

  LinkState state_ = LinkState::kConnecting;
  bool stopped_ = false;
  bool leaving_ = false;
  bool reports_draining_ = false;  // the worker itself
  WorkerFacts facts_;              // epoch empty: nobody known
  WorkerLoad load_;
  absl::Status trouble_;
  absl::Status doubt_;
  absl::Time last_report_ = absl::InfinitePast();  // the loop's AwakeNow
  absl::Duration back_off_;
  std::shared_ptr<WorkerClient> client_;
  std::unique_ptr<RpcCall> info_call_;
  std::unique_ptr<RpcStream> load_stream_;
  std::unique_ptr<RpcStream> kv_stream_;
  EventLoop::TimerId reconnect_timer_ = 0;
  EventLoop::TimerId heartbeat_timer_ = 0;
  EventLoop::TimerId kv_timer_ = 0;
};

}  // namespace router

#endif  // ROUTER_WORKER_LINK_H_

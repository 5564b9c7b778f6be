// WorkerRegistry: one WorkerLink per address, configured or found behind a DNS name, and what the
// router as a whole makes of them: which worker serves which model, and how a worker looks to the
// routing policy.
//
// A slot whose worker has been removed is empty until another address takes it: its link says gone.
//
// Owned by the loop's thread.

#ifndef ROUTER_WORKER_REGISTRY_H_
#define ROUTER_WORKER_REGISTRY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/load_ledger.h"
#include "router/pair_table.h"
#include "router/prefill_speeds.h"
#include "router/prefix_index.h"
#include "router/request.h"
#include "router/routing_policy.h"
#include "router/worker_link.h"

namespace router {

class WorkerRegistry final : public WorkerLink::Listener {
 public:
  struct Options {
    std::vector<std::string> addresses;
    std::vector<std::string> names;  // behind which SetFound will find more of them
    service::TlsOptions tls;
    absl::Duration heartbeat = absl::Seconds(1);
    absl::Duration cancel_ack = absl::Seconds(1);
    uint64_t hash_seed = 0;
    int32_t local_prefill_tokens = 0;  // PolicyOptions
  };

  // Everything must outlive the registry.
  WorkerRegistry(const Options& options, const ServedModels* models, EventLoop* loop,
                 std::shared_ptr<OutstandingCalls> outstanding, PrefixIndex* index,
                 LoadLedger* ledger);

  // `on_change`: some worker can take more or less than before.  `on_lost`: see
  // WorkerLink::Listener.
  void Start(
      std::function<void()> on_change,
      std::function<void(WorkerSlot, const std::string& epoch, const absl::Status&)> on_lost);
  void Stop();

  // What is behind names[name] now.  New addresses are connected to.  Those that are behind no name
  // any more, nor configured, leave.  An error changes nothing; that there is no address at all
  // (kNotFound) is believed of workers that do not serve.
  void SetFound(size_t name, const absl::StatusOr<std::vector<std::string>>& addresses);
  // Removes the leaving workers that no request needs any more; returns their addresses.
  std::vector<std::string> RemoveLeft(const std::function<bool(WorkerSlot)>& needed);

  // Slots, the empty ones included.
  int32_t num_workers() const { return static_cast<int32_t>(links_.size()); }
  WorkerLink& link(WorkerSlot slot) { return *links_[slot]; }
  const WorkerLink& link(WorkerSlot slot) const { return *links_[slot]; }

  // Serving, of this model, with this tokenizer.
  bool Serves(const WorkerLink& link, const ModelAssets& model) const;
  // How the worker looks to a request that can reuse `cached_blocks` leading blocks there.
  WorkerView View(const WorkerLink& link, int32_t cached_blocks, absl::Time now) const;

  // The worker has computed a prompt, which took `observed` of its engine's time.
  // Token counts that it cannot hold say nothing.
  void OnPrefilled(WorkerSlot slot, const std::string& epoch, uint32_t computed_tokens,
                   uint32_t cached_tokens, absl::Duration observed, absl::Time now);
  double prefill_slowdown(const WorkerLink& link, absl::Time now) const {
    return speeds_.slowdown(link.slot(), link.facts().epoch, now);
  }

  const PairTable& pairs() const { return pairs_; }
  // A try has shown that blocks of one cannot go to the other.  False: one of the two is another
  // process by now.
  bool MarkMisfit(WorkerSlot prefill, const std::string& prefill_epoch, WorkerSlot decode,
                  const std::string& decode_epoch, const std::string& why);

  struct Ready {
    int32_t prefill = 0;  // prefill and both; not those that fit none of the ready decode workers
    int32_t decode = 0;   // decode and both
  };
  Ready ReadyWorkers(const ModelAssets& model) const;

  // No worker is away: not known yet, silent, dead or draining; and every name has some.
  bool AllServe() const;

  // What everybody goes by who says that the router is ready: whether some model is_served().
  bool ServesAny() const;
  // OK, or kUnavailable naming what is missing.
  absl::Status CheckServed(const ModelAssets& model) const;
  // Names of the models that are served now.
  std::vector<std::string> ServedModelNames() const;

  // Workers that name their cached blocks otherwise than this router does.
  int64_t NumForeign() const;

  // Sentences for people.  Workers that get no request, until they or the router are started anew:
  std::vector<std::string> UnusedWorkers() const;
  // Serving pairs of the model that do not fit.
  std::vector<std::string> Misfits(const ModelAssets& model) const;
  // Who does not serve now but may again, and why: addresses where nobody answers, workers that are
  // suspect or drain, names with nothing behind them.
  std::vector<std::string> Away() const;
  // Of these the workers that a request of such lengths could go to.
  std::vector<std::string> AwayFor(const ModelAssets& model, const RequestView& request) const;
  // The first few of such sentences, and how many more: with many workers they all say the same.
  static std::string Joined(std::vector<std::string> sentences);

 private:
  void OnWorkerChanged(WorkerLink* link) override;
  void OnLoadReport(WorkerLink* link) override;
  void OnWorkerLost(WorkerLink* link, const std::string& epoch, const absl::Status& cause) override;
  WorkerLink* Add(const std::string& address);
  void UpdateLimits();
  WorkerLimits LimitsOf(const ModelAssets& model) const;
  void UpdatePairs(const WorkerLink& link);
  void UpdateTwins();
  // Serving workers of the model: prefill workers, or those that decode.
  std::vector<const WorkerLink*> Serving(const ModelAssets& model, bool prefill) const;
  std::string WhyUnused(const WorkerLink& link) const;  // "": it is used
  // It is known, and not about to be forgotten: it serves the model, or may again.
  static bool MayServe(const WorkerLink& link, const ModelAssets& model);

  struct Name {
    std::string text;
    absl::flat_hash_set<std::string> addresses;
    absl::Status trouble;  // of the last look-up
    bool looked_up = false;
  };

  const Options options_;
  const ServedModels* const models_;
  EventLoop* const loop_;
  const std::shared_ptr<OutstandingCalls> outstanding_;
  PrefixIndex* const index_;
  LoadLedger* const ledger_;
  PairTable pairs_;
  PrefillSpeeds speeds_;
  std::function<void()> on_change_;
  std::function<void(WorkerSlot, const std::string&, const absl::Status&)> on_lost_;
  std::vector<std::unique_ptr<WorkerLink>> links_;  // by slot
  std::vector<Name> names_;                         // by place in options.names
  // Slots whose worker is that of another slot under another address (IPv4 and IPv6, say).
  absl::flat_hash_set<WorkerSlot> twins_;
};

}  // namespace router

#endif  // ROUTER_WORKER_REGISTRY_H_

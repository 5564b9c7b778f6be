// WorkerRegistry: one WorkerLink per configured address, and what the router as a whole makes of
// them: which worker serves which model, and how a worker looks to the routing policy.
//
// Owned by the loop's thread.

#ifndef ROUTER_WORKER_REGISTRY_H_
#define ROUTER_WORKER_REGISTRY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "router/load_ledger.h"
#include "router/pair_table.h"
#include "router/prefix_index.h"
#include "router/request.h"
#include "router/routing_policy.h"
#include "router/worker_link.h"

namespace router {

class WorkerRegistry final : public WorkerLink::Listener {
 public:
  struct Options {
    std::vector<std::string> addresses;
    service::TlsOptions tls;
    absl::Duration heartbeat = absl::Seconds(1);
    uint64_t hash_seed = 0;
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

  int32_t num_workers() const { return static_cast<int32_t>(links_.size()); }
  WorkerLink& link(WorkerSlot slot) { return *links_[slot]; }
  const WorkerLink& link(WorkerSlot slot) const { return *links_[slot]; }

  // Serving, of this model, with this tokenizer.
  bool Serves(const WorkerLink& link, const ModelAssets& model) const;
  // How the worker looks to a request that can reuse `cached_blocks` leading blocks there.
  WorkerView View(const WorkerLink& link, int32_t cached_blocks, absl::Time now) const;

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

  // No worker is away: not known yet, silent, gone or draining.
  bool AllServe() const;

  // Names of the models that some worker decodes now.
  std::vector<std::string> ReadyModels() const;

  // Sentences for people.  Workers that get no request, until they or the router are started anew:
  std::vector<std::string> UnusedWorkers() const;
  // Serving pairs of the model that do not fit.
  std::vector<std::string> Misfits(const ModelAssets& model) const;
  // Addresses where nobody answers now.
  std::vector<std::string> Unreachable() const;

 private:
  void OnWorkerChanged(WorkerLink* link) override;
  void OnLoadReport(WorkerLink* link) override;
  void OnWorkerLost(WorkerLink* link, const std::string& epoch, const absl::Status& cause) override;
  void UpdateModelLimits();
  void UpdatePairs(const WorkerLink& link);
  // Serving workers of the model: prefill workers, or those that decode.
  std::vector<const WorkerLink*> Serving(const ModelAssets& model, bool prefill) const;
  std::string WhyUnused(const WorkerLink& link) const;  // "": it is used

  const ServedModels* const models_;
  LoadLedger* const ledger_;
  PairTable pairs_;
  std::function<void()> on_change_;
  std::function<void(WorkerSlot, const std::string&, const absl::Status&)> on_lost_;
  std::vector<std::unique_ptr<WorkerLink>> links_;  // by slot
};

}  // namespace router

#endif  // ROUTER_WORKER_REGISTRY_H_

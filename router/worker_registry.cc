#include "router/worker_registry.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "service/process.h"

namespace router {

WorkerRegistry::WorkerRegistry(const Options& options, const ServedModels* models, EventLoop* loop,
                               std::shared_ptr<OutstandingCalls> outstanding, PrefixIndex* index,
                               LoadLedger* ledger)
    : models_(models), ledger_(ledger) {
  for (const std::string& address : options.addresses) {
    const WorkerLink::Options link_options = {.address = address,
                                              .tls = options.tls,
                                              .heartbeat = options.heartbeat,
                                              .hash_seed = options.hash_seed};
    links_.push_back(std::make_unique<WorkerLink>(static_cast<WorkerSlot>(links_.size()),
                                                  link_options, loop, outstanding, index, this));
  }
}

void WorkerRegistry::Start(
    std::function<void()> on_change,
    std::function<void(WorkerSlot, const std::string&, const absl::Status&)> on_lost) {
  on_change_ = std::move(on_change);
  on_lost_ = std::move(on_lost);
  for (const auto& link : links_) link->Start();
}

void WorkerRegistry::Stop() {
  for (const auto& link : links_) link->Stop();
}

bool WorkerRegistry::Serves(const WorkerLink& link, const ModelAssets& model) const {
  const WorkerFacts& facts = link.facts();
  return link.state() == LinkState::kServing && facts.model == model.name &&
         (facts.tokenizer_hash.empty() || model.tokenizer_hash.empty() ||
          facts.tokenizer_hash == model.tokenizer_hash);
}

WorkerView WorkerRegistry::View(const WorkerLink& link, int32_t prompt_tokens,
                                int32_t cached_blocks, absl::Time now) const {
  const WorkerFacts& facts = link.facts();
  const WorkerLoad& load = link.load();
  const LoadLedger::Load ours = ledger_->uncommitted(link.slot());
  // The last token is always computed, and only whole blocks are reused.
  const int32_t reusable_blocks = std::min(cached_blocks, (prompt_tokens - 1) / facts.block_size);
  return {.slot = link.slot(),
          .can_decode = facts.role == LinkRole::kDecode || facts.role == LinkRole::kBoth,
          .is_prefill = facts.role == LinkRole::kPrefill,
          .prefills_any_length = facts.role == LinkRole::kBoth,
          .block_size = facts.block_size,
          .block_bytes = facts.block_bytes,
          .num_blocks = facts.num_blocks,
          .used_blocks = load.used_blocks + ours.kv_blocks + ours.growth_blocks,
          .max_model_len = facts.max_model_len,
          .layout = facts.layout,
          .prefill_tokens_per_s = facts.prefill_tokens_per_s,
          .prefill_s_per_token2 = facts.prefill_s_per_token2,
          .decode_step_ms = facts.decode_step_ms,
          .decode_step_ms_per_seq = facts.decode_step_ms_per_seq,
          .observed_step_ms = load.step_ms,
          .waiting_tokens = load.waiting_tokens + ours.prefill_tokens,
          .requests = load.running_requests + load.waiting_requests + ours.requests,
          .cached_tokens = reusable_blocks * facts.block_size,
          .recent_assignments = ledger_->recent_assignments(link.slot(), now)};
}

WorkerRegistry::Ready WorkerRegistry::ReadyWorkers(const ModelAssets& model) const {
  Ready ready;
  for (const auto& link : links_) {
    if (!Serves(*link, model)) continue;
    const LinkRole role = link->facts().role;
    if (role != LinkRole::kDecode) ++ready.prefill;
    if (role != LinkRole::kPrefill) ++ready.decode;
  }
  return ready;
}

void WorkerRegistry::UpdateModelLimits() {
  for (const auto& model : models_->all()) {
    int32_t longest = 0;
    for (const auto& link : links_) {
      if (link->facts().model == model->name) {
        longest = std::max(longest, link->facts().max_model_len);
      }
    }
    model->workers_max_model_len.store(longest);
  }
}

void WorkerRegistry::OnWorkerChanged(WorkerLink* link) {
  UpdateModelLimits();
  if (link->state() == LinkState::kServing) {
    const auto& all = models_->all();
    const auto model = std::find_if(all.begin(), all.end(), [&](const auto& candidate) {
      return candidate->name == link->facts().model;
    });
    if (model == all.end()) {
      spdlog::warn("worker={} model={}: not among the served models, no request goes there",
                   link->address(), link->facts().model);
    } else if (!Serves(*link, **model)) {
      spdlog::warn("worker={} model={} tokenizer_hash={} ours={}: no request goes there",
                   link->address(), link->facts().model, link->facts().tokenizer_hash,
                   (*model)->tokenizer_hash);
    }
  }
  on_change_();
}

void WorkerRegistry::OnLoadReport(WorkerLink* link) {
  ledger_->OnReport(link->slot());
  on_change_();
}

void WorkerRegistry::OnWorkerLost(WorkerLink* link, const std::string& epoch,
                                  const absl::Status& cause) {
  spdlog::warn("worker={} lost={}", link->address(), service::LogValue(cause.ToString()));
  on_lost_(link->slot(), epoch, cause);
}

}  // namespace router

#include "router/worker_registry.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "service/process.h"

namespace router {

WorkerRegistry::WorkerRegistry(const Options& options, const ServedModels* models, EventLoop* loop,
                               std::shared_ptr<OutstandingCalls> outstanding, PrefixIndex* index,
                               LoadLedger* ledger)
    : options_(options),
      models_(models),
      loop_(loop),
      outstanding_(std::move(outstanding)),
      index_(index),
      ledger_(ledger) {
  for (const std::string& address : options.addresses) Add(address);
  for (const std::string& name : options.names) {
    names_.push_back(
        {.text = name,
         .addresses = {},
         .trouble = absl::UnavailableError(absl::StrCat(name, " has not been looked up yet"))});
  }
}

WorkerLink* WorkerRegistry::Add(const std::string& address) {
  const auto empty = std::find_if(links_.begin(), links_.end(), [](const auto& link) {
    return link->state() == LinkState::kGone;
  });
  const auto slot = static_cast<WorkerSlot>(empty - links_.begin());
  if (empty == links_.end()) links_.emplace_back();
  const WorkerLink::Options link_options = {.address = address,
                                            .tls = options_.tls,
                                            .heartbeat = options_.heartbeat,
                                            .cancel_ack = options_.cancel_ack,
                                            .hash_seed = options_.hash_seed};
  links_[slot] =
      std::make_unique<WorkerLink>(slot, link_options, loop_, outstanding_, index_, this);
  return links_[slot].get();
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

void WorkerRegistry::SetFound(size_t name,
                              const absl::StatusOr<std::vector<std::string>>& addresses) {
  Name& changed = names_[name];
  if (addresses.status() != changed.trouble) {
    const bool ok = addresses.ok();
    spdlog::log(ok ? spdlog::level::info : spdlog::level::warn, "workers={} {}", changed.text,
                ok ? absl::StrCat("found=", addresses->size())
                   : absl::StrCat("unknown cause=",
                                  service::LogValue(std::string(addresses.status().message()))));
  }
  changed.trouble = addresses.status();
  changed.looked_up = true;
  const auto update = absl::MakeCleanup([this] { UpdateLimits(); });
  if (addresses.ok()) {
    changed.addresses = {addresses->begin(), addresses->end()};
  } else if (absl::IsNotFound(addresses.status())) {
    for (const auto& link : links_) {
      if (link->state() != LinkState::kServing) changed.addresses.erase(link->address());
    }
  } else {
    return;
  }

  absl::flat_hash_set<std::string> wanted(options_.addresses.begin(), options_.addresses.end());
  for (const Name& one : names_) wanted.insert(one.addresses.begin(), one.addresses.end());
  for (const auto& link : links_) {
    if (link->state() == LinkState::kGone) continue;
    if (wanted.erase(link->address()) > 0) {
      if (!link->leaving()) continue;
      spdlog::info("worker={} stays", link->address());
      link->Stay();
    } else if (!link->leaving()) {
      spdlog::info("worker={} leaves", link->address());
      link->Leave();
    }
  }
  for (const std::string& address : wanted) {
    spdlog::info("worker={} found name={}", address, changed.text);
    Add(address)->Start();
  }
}

std::vector<std::string> WorkerRegistry::RemoveLeft(const std::function<bool(WorkerSlot)>& needed) {
  std::vector<std::string> removed;
  for (const auto& link : links_) {
    if (!link->leaving() || link->state() == LinkState::kGone || needed(link->slot())) continue;
    spdlog::info("worker={} removed", link->address());
    removed.push_back(link->address());
    link->Remove();
    index_->DropWorker(link->slot());
    pairs_.Update(link->slot(), PairTable::Worker());
  }
  if (removed.empty()) return removed;
  UpdateTwins();
  UpdateLimits();
  on_change_();
  return removed;
}

// Of a worker's addresses one is used: one where it serves, and the first of these.
void WorkerRegistry::UpdateTwins() {
  absl::flat_hash_map<std::string, WorkerSlot> used;  // by epoch
  for (const bool serving : {true, false}) {
    for (const auto& link : links_) {
      if ((link->state() == LinkState::kServing) == serving && !link->facts().epoch.empty()) {
        used.try_emplace(link->facts().epoch, link->slot());
      }
    }
  }
  for (const auto& link : links_) {
    const auto it = used.find(link->facts().epoch);
    if (it == used.end() || it->second == link->slot()) {
      twins_.erase(link->slot());
    } else if (twins_.insert(link->slot()).second) {
      spdlog::info("worker={} is the same process as worker={}", link->address(),
                   links_[it->second]->address());
    }
  }
}

bool WorkerRegistry::Serves(const WorkerLink& link, const ModelAssets& model) const {
  return link.state() == LinkState::kServing && !twins_.contains(link.slot()) &&
         MayServe(link, model);
}

bool WorkerRegistry::MayServe(const WorkerLink& link, const ModelAssets& model) {
  const WorkerFacts& facts = link.facts();
  return !facts.epoch.empty() && !link.leaving() && facts.model == model.name &&
         (facts.tokenizer_hash.empty() || model.tokenizer_hash.empty() ||
          facts.tokenizer_hash == model.tokenizer_hash);
}

WorkerView WorkerRegistry::View(const WorkerLink& link, int32_t cached_blocks,
                                absl::Time now) const {
  return MakeView(link.slot(), link.facts(), link.load(), ledger_->uncommitted(link.slot()),
                  ledger_->requests_in_flight(link.slot()), cached_blocks,
                  ledger_->recent_assignments(link.slot(), now), prefill_slowdown(link, now));
}

void WorkerRegistry::OnPrefilled(WorkerSlot slot, const std::string& epoch,
                                 uint32_t computed_tokens, uint32_t cached_tokens,
                                 absl::Duration observed, absl::Time now) {
  const WorkerFacts& facts = link(slot).facts();
  if (facts.epoch != epoch) return;
  if (uint64_t{computed_tokens} + cached_tokens > static_cast<uint64_t>(facts.max_model_len)) {
    return;
  }
  const absl::Duration stated = StatedPrefillTime(facts, static_cast<int32_t>(computed_tokens),
                                                  static_cast<int32_t>(cached_tokens));
  // What any step costs, however few its tokens, would hide their time.
  if (stated < absl::Milliseconds(facts.decode_step_ms)) return;
  speeds_.Observe(slot, epoch, stated, observed, now);
}

std::vector<const WorkerLink*> WorkerRegistry::Serving(const ModelAssets& model,
                                                       bool prefill) const {
  std::vector<const WorkerLink*> serving;
  for (const auto& link : links_) {
    const bool is_prefill = link->facts().role == LinkRole::kPrefill;
    if (is_prefill == prefill && Serves(*link, model)) serving.push_back(link.get());
  }
  return serving;
}

WorkerRegistry::Ready WorkerRegistry::ReadyWorkers(const ModelAssets& model) const {
  const std::vector<const WorkerLink*> decodes = Serving(model, /*prefill=*/false);
  Ready ready = {.prefill = 0, .decode = static_cast<int32_t>(decodes.size())};
  for (const WorkerLink* link : decodes) ready.prefill += link->facts().role == LinkRole::kBoth;
  for (const WorkerLink* link : Serving(model, /*prefill=*/true)) {
    ready.prefill += decodes.empty() || std::any_of(decodes.begin(), decodes.end(), [&](auto* d) {
                       return pairs_.fits(link->slot(), d->slot());
                     });
  }
  return ready;
}

bool WorkerRegistry::AllServe() const {
  return std::all_of(links_.begin(), links_.end(),
                     [](const auto& link) {
                       return link->state() == LinkState::kServing || link->leaving();
                     }) &&
         std::all_of(names_.begin(), names_.end(),
                     [](const Name& name) { return name.trouble.ok(); });
}

int64_t WorkerRegistry::NumForeign() const {
  return std::count_if(links_.begin(), links_.end(), [](const auto& link) {
    return !link->facts().epoch.empty() && !link->shares_hashes();
  });
}

bool WorkerRegistry::ServesAny() const {
  return std::any_of(models_->all().begin(), models_->all().end(),
                     [](const auto& model) { return model->is_served(); });
}

void WorkerRegistry::UpdatePairs(const WorkerLink& link) {
  const WorkerFacts& facts = link.facts();
  if (facts.epoch.empty()) return;
  const bool is_prefill = facts.role == LinkRole::kPrefill;
  const bool is_new = pairs_.Update(link.slot(), {.epoch = facts.epoch,
                                                  .is_prefill = is_prefill,
                                                  .model = facts.model,
                                                  .profile = facts.profile});
  if (!is_new) return;
  int32_t misfits = 0;
  std::string first;
  for (const auto& other : links_) {
    const std::string& why = is_prefill ? pairs_.why(link.slot(), other->slot())
                                        : pairs_.why(other->slot(), link.slot());
    if (!why.empty() && ++misfits == 1) first = why;
  }
  if (misfits == 0) return;
  spdlog::warn("worker={} misfits={} cause={}", link.address(), misfits, service::LogValue(first));
}

bool WorkerRegistry::MarkMisfit(WorkerSlot prefill, const std::string& prefill_epoch,
                                WorkerSlot decode, const std::string& decode_epoch,
                                const std::string& why) {
  const bool known = !pairs_.fits(prefill, decode);
  if (!pairs_.Mark(prefill, prefill_epoch, decode, decode_epoch, why)) return false;
  if (!known) {
    spdlog::warn("worker={} misfits=1 cause={}", link(prefill).address(), service::LogValue(why));
    UpdateLimits();
  }
  return true;
}

void WorkerRegistry::UpdateLimits() {
  for (const auto& model : models_->all()) model->SetWorkerLimits(LimitsOf(*model));
}

WorkerLimits WorkerRegistry::LimitsOf(const ModelAssets& model) const {
  WorkerLimits limits;
  limits.all_known = true;
  std::vector<const WorkerLink*> prefills, decodes;
  for (const auto& link : links_) {
    // Once asked in vain it is no longer waited for with the answer to a prompt that is too long.
    limits.all_known &= link->state() != LinkState::kConnecting || !link->trouble().ok();
    if (!MayServe(*link, model)) continue;
    (link->facts().role == LinkRole::kPrefill ? prefills : decodes).push_back(link.get());
  }
  for (const Name& name : names_) limits.all_known &= name.looked_up;
  const auto longest_prompt = [](const WorkerFacts& facts) {
    return LongestPrompt(facts.max_model_len, facts.block_size, facts.num_blocks);
  };
  const auto add = [&limits](const LengthRoom& room, bool serves) {
    if (room.prompt < 1) return;
    limits.known.Add(room);
    limits.known_context = std::max(limits.known_context, room.prompt + 1);
    if (!serves) return;
    limits.serving.Add(room);
    limits.serving_context = std::max(limits.serving_context, room.prompt + 1);
  };
  for (const WorkerLink* decode : decodes) {
    const WorkerFacts& facts = decode->facts();
    const bool serves = Serves(*decode, model);
    const LengthRoom room = {.prompt = longest_prompt(facts),
                             .total = facts.max_model_len > 0
                                          ? facts.max_model_len
                                          : std::numeric_limits<int32_t>::max()};
    const LengthRoom local = {.prompt = std::min(room.prompt, options_.local_prefill_tokens),
                              .total = room.total};
    const bool takes_all = facts.role == LinkRole::kBoth || local.prompt == room.prompt;
    if (takes_all || prefills.empty()) add(room, takes_all && serves);
    if (serves) limits.serving.Add(local);
    limits.known.Add(local);
    for (const WorkerLink* prefill : prefills) {
      add({.prompt = std::min(room.prompt, longest_prompt(prefill->facts())), .total = room.total},
          serves && Serves(*prefill, model) && pairs_.fits(prefill->slot(), decode->slot()));
    }
  }
  return limits;
}

void WorkerRegistry::OnWorkerChanged(WorkerLink* link) {
  UpdatePairs(*link);
  UpdateTwins();
  UpdateLimits();
  if (link->state() == LinkState::kServing && !twins_.contains(link->slot())) {
    if (const std::string why = WhyUnused(*link); !why.empty()) {
      spdlog::warn("worker={} unused cause={}", link->address(), service::LogValue(why));
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
  spdlog::warn("worker={} lost cause={}", link->address(),
               service::LogValue(std::string(cause.message())));
  on_lost_(link->slot(), epoch, cause);
}

}  // namespace router

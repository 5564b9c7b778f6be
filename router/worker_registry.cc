#include "router/worker_registry.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/process.h"
#include "status/public_message.h"

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
  const WorkerFacts& facts = link.facts();
  return link.state() == LinkState::kServing && !twins_.contains(link.slot()) &&
         facts.model == model.name &&
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

bool WorkerRegistry::IsServed(const ModelAssets& model) const {
  const Ready ready = ReadyWorkers(model);
  const int32_t longest = model.context_tokens();
  const bool all_local = longest > 0 && longest <= options_.local_prefill_tokens;
  return ready.decode > 0 && (ready.prefill > 0 || all_local);
}

absl::Status WorkerRegistry::CheckServed(const ModelAssets& model) const {
  if (IsServed(model)) return absl::OkStatus();
  const Ready ready = ReadyWorkers(model);
  std::string message = absl::StrCat("model ", model.name, " is not served now: ");
  std::vector<std::string> reasons = Misfits(model);
  if (ready.decode == 0) {
    absl::StrAppend(&message, ready.prefill == 0 ? "neither a prefill nor a decode worker is ready"
                                                 : "no decode worker is ready");
  } else if (reasons.empty()) {
    absl::StrAppend(&message, "no prefill worker is ready, nor a decode worker of --role=both");
  } else {
    absl::StrAppend(&message, "no prefill worker that is ready fits a decode worker that is");
  }
  for (std::vector<std::string> more : {UnusedWorkers(), Unreachable()}) {
    std::move(more.begin(), more.end(), std::back_inserter(reasons));
  }
  const std::string why = reasons.empty() ? "" : absl::StrCat("; ", Joined(std::move(reasons)));
  return status::WithPublicMessage(absl::UnavailableError(message + why), message);
}

std::vector<std::string> WorkerRegistry::ServedModelNames() const {
  std::vector<std::string> names;
  for (const auto& model : models_->all()) {
    if (IsServed(*model)) names.push_back(model->name);
  }
  return names;
}

std::string WorkerRegistry::Joined(std::vector<std::string> sentences) {
  constexpr size_t kMost = 3;
  const size_t more = sentences.size() - std::min(sentences.size(), kMost);
  sentences.resize(sentences.size() - more);
  if (more > 0) sentences.push_back(absl::StrCat(more, " more like these"));
  return absl::StrJoin(sentences, "; ");
}

std::vector<std::string> WorkerRegistry::Misfits(const ModelAssets& model) const {
  std::vector<std::string> sentences;
  for (const WorkerLink* prefill : Serving(model, /*prefill=*/true)) {
    for (const WorkerLink* decode : Serving(model, /*prefill=*/false)) {
      const std::string& why = pairs_.why(prefill->slot(), decode->slot());
      if (!why.empty()) sentences.push_back(why);
    }
  }
  return sentences;
}

std::string WorkerRegistry::WhyUnused(const WorkerLink& link) const {
  const auto& all = models_->all();
  const WorkerFacts& facts = link.facts();
  const auto model = std::find_if(all.begin(), all.end(), [&](const auto& candidate) {
    return candidate->name == facts.model;
  });
  if (model == all.end()) {
    return absl::StrCat("worker ", link.address(), " serves model ", facts.model,
                        ", this router serves ", absl::StrJoin(models_->names(), ", "),
                        " (--model_assets NAME=DIR, --model_name)");
  }
  if (Serves(link, **model)) return "";
  return absl::StrCat("worker ", link.address(), " has another tokenizer for model ", facts.model,
                      ": its tokenizer_hash is ", facts.tokenizer_hash, ", that of this router ",
                      (*model)->tokenizer_hash);
}

std::vector<std::string> WorkerRegistry::UnusedWorkers() const {
  std::vector<std::string> sentences;
  for (const auto& link : links_) {
    if (link->state() != LinkState::kServing || twins_.contains(link->slot())) continue;
    if (std::string why = WhyUnused(*link); !why.empty()) sentences.push_back(std::move(why));
  }
  return sentences;
}

std::vector<std::string> WorkerRegistry::Unreachable() const {
  std::vector<std::string> sentences;
  for (const auto& link : links_) {
    if (link->trouble().ok() || link->leaving()) continue;
    sentences.push_back(std::string(link->trouble().message()));
  }
  for (const Name& name : names_) {
    if (!name.trouble.ok()) sentences.push_back(std::string(name.trouble.message()));
  }
  return sentences;
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
  }
  return true;
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
  UpdatePairs(*link);
  UpdateTwins();
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

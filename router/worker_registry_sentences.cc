// What the WorkerRegistry says to people: what is missing, who is away, and why.

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "router/worker_registry.h"
#include "status/public_message.h"

namespace router {
namespace {

// "": it serves.
std::string WhyAway(const WorkerLink& link) {
  const LinkState state = link.state();
  if (state == LinkState::kServing || state == LinkState::kGone) return "";
  std::string why = absl::StrCat("worker ", link.address(), " has not answered yet");
  if (!link.trouble().ok()) {
    why = std::string(link.trouble().message());
  } else if (state == LinkState::kDraining) {
    why = absl::StrCat("worker ", link.address(), " takes no more requests");
  } else if (!link.doubt().ok()) {
    why = std::string(link.doubt().message());
  }
  if (link.facts().epoch.empty()) return why;
  return absl::StrCat(why, " (", LinkRoleName(link.facts().role), ", ", LinkStateName(state), ")");
}

}  // namespace

absl::Status WorkerRegistry::CheckServed(const ModelAssets& model) const {
  if (model.is_served()) return absl::OkStatus();
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
  for (std::vector<std::string> more : {UnusedWorkers(), Away()}) {
    std::move(more.begin(), more.end(), std::back_inserter(reasons));
  }
  const std::string why = reasons.empty() ? "" : absl::StrCat("; ", Joined(std::move(reasons)));
  return status::WithPublicMessage(absl::UnavailableError(message + why), message);
}

std::vector<std::string> WorkerRegistry::ServedModelNames() const {
  std::vector<std::string> names;
  for (const auto& model : models_->all()) {
    if (model->is_served()) names.push_back(model->name);
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

std::vector<std::string> WorkerRegistry::Away() const {
  std::vector<std::string> sentences;
  for (const auto& link : links_) {
    if (link->leaving()) continue;
    if (std::string why = WhyAway(*link); !why.empty()) sentences.push_back(std::move(why));
  }
  for (const Name& name : names_) {
    if (!name.trouble.ok()) sentences.push_back(std::string(name.trouble.message()));
  }
  return sentences;
}

std::vector<std::string> WorkerRegistry::AwayFor(const ModelAssets& model,
                                                 const RequestView& request) const {
  const auto holds = [&](const WorkerLink& link) {
    return HoldsLength(View(link, 0, EventLoop::Now()), request);
  };
  bool prefill_serves = false, decode_serves = false;
  for (const auto& link : links_) {
    if (!Serves(*link, model) || !holds(*link)) continue;
    (link->facts().role == LinkRole::kPrefill ? prefill_serves : decode_serves) = true;
  }
  std::vector<std::string> sentences;
  for (const auto& link : links_) {
    const WorkerFacts& facts = link->facts();
    const std::string why = WhyAway(*link);
    if (why.empty() || !MayServe(*link, model) || !holds(*link)) continue;
    // One more of those that are there would not help where only the others are missing.
    if (facts.role == LinkRole::kPrefill && prefill_serves && !decode_serves) continue;
    if (facts.role == LinkRole::kDecode && decode_serves && !prefill_serves) continue;
    sentences.push_back(absl::StrCat(why, ", which takes ", facts.max_model_len, " tokens"));
  }
  return sentences;
}

}  // namespace router

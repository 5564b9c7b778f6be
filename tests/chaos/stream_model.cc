#include "tests/chaos/stream_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace chaos {

StreamModel::StreamModel(size_t num_prompt_tokens, std::vector<std::vector<int32_t>> expected)
    : num_prompt_tokens_(num_prompt_tokens),
      expected_(std::move(expected)),
      branches_(expected_.size()) {}

void StreamModel::Wrong(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

void StreamModel::OnMessage(const ferry::v1::GenerateResponse& message) {
  if (ended_) return Wrong("a message behind the end");
  if (has_summary_) return Wrong("a message behind the summary");
  if (message.index() >= branches_.size()) {
    return Wrong(absl::StrCat("branch ", message.index(), " of ", branches_.size()));
  }
  Branch& branch = branches_[message.index()];
  const std::vector<int32_t>& expected = expected_[message.index()];
  if (message.token_ids_size() > 0 && branch.finished) Wrong("a token behind its branch's end");
  for (const uint32_t token : message.token_ids()) {
    if (branch.seen >= expected.size() || static_cast<int32_t>(token) != expected[branch.seen]) {
      Wrong(absl::StrCat("token ", branch.seen, " of branch ", message.index(), " is ", token,
                         branch.seen < expected.size()
                             ? absl::StrCat(", a single engine says ", expected[branch.seen])
                             : ", a single engine has ended"));
    }
    ++branch.seen;
    ++num_tokens_;
  }
  if (message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
    if (branch.finished) Wrong("two ends of a branch");
    if (branch.seen != expected.size()) {
      Wrong(absl::StrCat("branch ", message.index(), " ends after ", branch.seen, " of ",
                         expected.size(), " tokens"));
    }
    branch.finished = true;
  }
  if (!message.has_summary()) return;
  has_summary_ = true;
  if (!std::all_of(branches_.begin(), branches_.end(), [](const auto& b) { return b.finished; })) {
    Wrong("a summary before the last branch's end");
  }
  const ferry::v1::GenerateSummary& summary = message.summary();
  if (summary.completion_tokens() != num_tokens_ || summary.prompt_tokens() != num_prompt_tokens_) {
    Wrong(absl::StrCat("a summary of ", summary.prompt_tokens(), " + ", summary.completion_tokens(),
                       " tokens for ", num_prompt_tokens_, " + ", num_tokens_));
  }
}

void StreamModel::OnEnd(const absl::Status& status, bool router_died) {
  if (ended_) Wrong("two ends");
  ended_ = true;
  if (status.ok() && !has_summary_) Wrong("OK without a summary");
  // A router that dies behind its last message cannot say OK any more.
  const bool cut_off = router_died && absl::IsUnavailable(status);
  // gRPC's word when the client's own clock ended the call: OK was on its way.
  const bool in_time = absl::IsDeadlineExceeded(status) && status.message() == "Deadline Exceeded";
  if (!status.ok() && has_summary_ && !client_left_ && !cut_off && !in_time) {
    Wrong("a summary and an error");
  }
  if (absl::IsCancelled(status) && !client_left_) Wrong("cancelled by nobody");
}

}  // namespace chaos

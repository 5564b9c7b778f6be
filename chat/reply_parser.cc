#include "chat/reply_parser.h"

#include <algorithm>
#include <utility>

#include "chat/markers.h"

namespace chat {
namespace {

// Where the first of `markers` begins in `text`, or where one may begin that is not whole yet.
struct Found {
  size_t at = std::string_view::npos;   // text.size(): none
  const std::string* marker = nullptr;  // null: none is whole
};

size_t PartialAt(std::string_view text, std::string_view marker) {
  const size_t longest = std::min(text.size(), marker.size() - 1);
  for (size_t n = longest; n > 0; --n) {
    if (text.ends_with(marker.substr(0, n))) return text.size() - n;
  }
  return text.size();
}

Found Find(std::string_view text, const std::vector<std::string>& markers) {
  Found found{text.size(), nullptr};
  for (const std::string& marker : markers) {
    const size_t at = std::min(text.find(marker), text.size());
    if (at < found.at) found = {at, &marker};
  }
  if (found.marker != nullptr) return found;
  for (const std::string& marker : markers) found.at = std::min(found.at, PartialAt(text, marker));
  return found;
}

}  // namespace

std::vector<std::string_view> ReplyMarkers() {
  return {kThink, kEndThink, kCallsBegin, kCallsEnd, kCallBegin, kCallEnd, kSep, kDsml};
}

ReplyParser::ReplyParser(const Options& options)
    : may_reason_(options.format != Format::kV2),
      in_reasoning_(options.in_reasoning),
      syntax_(options.tools ? ToolSyntaxOf(options.format) : nullptr) {}

ReplyDelta ReplyParser::Append(std::string_view text) {
  pending_.append(text);
  ReplyDelta out;
  while (Step(/*ended=*/false, &out)) {
  }
  return out;
}

ReplyDelta ReplyParser::Finish() {
  ReplyDelta out;
  while (Step(/*ended=*/true, &out)) {
  }
  return out;
}

bool ReplyParser::Step(bool ended, ReplyDelta* out) {
  if (pending_.empty()) return false;
  switch (state_) {
    case State::kStart:
      return StepStart(ended);
    case State::kReasoning:
      return StepReasoning(ended, out);
    case State::kContent:
      return StepContent(ended, out);
    case State::kCalls:
      return StepCalls(ended, out);
    case State::kRest:
      Give(pending_.size(), &out->content);
      return false;
  }
  return false;
}

// A model may open its reasoning itself, and even where the prompt has done so.
bool ReplyParser::StepStart(bool ended) {
  state_ = in_reasoning_ ? State::kReasoning : State::kContent;
  if (!may_reason_) return true;
  if (pending_.starts_with(kThink)) {
    pending_.erase(0, kThink.size());
    state_ = State::kReasoning;
  } else if (!ended && kThink.starts_with(pending_)) {
    state_ = State::kStart;
    return false;
  }
  return true;
}

bool ReplyParser::StepReasoning(bool ended, ReplyDelta* out) {
  static const auto* const end = new std::vector<std::string>{std::string(kEndThink)};
  const Found found = Find(pending_, *end);
  if (found.marker == nullptr) {
    Give(ended ? pending_.size() : found.at, &out->reasoning_content);
    return false;
  }
  Give(found.at, &out->reasoning_content);
  pending_.erase(0, found.marker->size());
  state_ = State::kContent;
  return true;
}

bool ReplyParser::StepContent(bool ended, ReplyDelta* out) {
  if (syntax_ == nullptr) {
    Give(pending_.size(), &out->content);
    return false;
  }
  const Found found = Find(pending_, syntax_->open);
  if (found.marker == nullptr) {
    Give(ended ? pending_.size() : found.at, &out->content);
    return false;
  }
  Give(found.at, &out->content);
  unread_ = *found.marker;
  pending_.erase(0, unread_.size());
  state_ = State::kCalls;
  return true;
}

bool ReplyParser::StepCalls(bool ended, ReplyDelta* out) {
  const size_t blanks = pending_.size() - WithoutLeadingBlanks(pending_).size();
  Give(blanks, &unread_);
  if (pending_.empty()) return false;  // a model may end without closing
  const auto& [open, begin, end, close, parse] = *syntax_;
  if (pending_.starts_with(close)) {
    pending_.erase(0, close.size());
    unread_.clear();
    state_ = State::kContent;
    return true;
  }
  if (pending_.starts_with(begin)) {
    const size_t at = pending_.find(end, std::max(searched_, begin.size()));
    if (at == pending_.npos && !ended) {
      searched_ = pending_.size() - std::min(pending_.size(), end.size() - 1);
      return false;
    }
    searched_ = 0;
    const std::string_view call_text = std::string_view(pending_).substr(0, at);
    if (at != pending_.npos) {
      if (auto call = parse(call_text.substr(begin.size()))) {
        out->tool_calls.push_back(std::move(*call));
        pending_.erase(0, at + end.size());
        unread_.clear();
        return true;
      }
    }
  } else if (!ended && (begin.starts_with(pending_) || close.starts_with(pending_))) {
    return false;
  }
  out->content += unread_;
  unread_.clear();
  state_ = State::kRest;
  return true;
}

void ReplyParser::Give(size_t num_bytes, std::string* out) {
  out->append(pending_, 0, num_bytes);
  pending_.erase(0, num_bytes);
}

}  // namespace chat

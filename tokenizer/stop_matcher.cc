#include "tokenizer/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace tokenizer {

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop), matched_(stops_.size(), 0) {
  for (const std::string& stop : stops_) {
    // borders[n]: bytes of the longest proper border of the first n bytes of `stop`.
    std::vector<size_t>& borders = borders_.emplace_back(stop.size() + 1, 0);
    for (size_t n = 2; n <= stop.size(); ++n) {
      size_t border = borders[n - 1];
      while (border > 0 && stop[border] != stop[n - 1]) border = borders[border];
      borders[n] = stop[border] == stop[n - 1] ? border + 1 : 0;
    }
  }
}

std::string StopMatcher::Add(std::string_view text, bool may_stop) {
  if (stopped_) return "";
  size_t longest_match = 0;
  size_t used = 0;
  while (used < text.size() && longest_match == 0) {
    const char c = text[used++];
    for (size_t s = 0; s < stops_.size(); ++s) {
      const std::string& stop = stops_[s];
      size_t& matched = matched_[s];
      while (matched > 0 && stop[matched] != c) matched = borders_[s][matched];
      if (stop[matched] == c) ++matched;
      if (matched < stop.size()) continue;
      if (may_stop) longest_match = std::max(longest_match, matched);
      matched = borders_[s][matched];
    }
  }
  std::string out = std::exchange(held_, "");
  out += text.substr(0, used);
  if (longest_match > 0) {
    stopped_ = true;
    if (!include_stop_) out.resize(out.size() - longest_match);
    return out;
  }
  const size_t hold = matched_.empty() ? 0 : *std::max_element(matched_.begin(), matched_.end());
  held_ = out.substr(out.size() - hold);
  out.resize(out.size() - hold);
  return out;
}

std::string StopMatcher::Finish() { return std::exchange(held_, ""); }

}  // namespace tokenizer

// StopMatcher: cuts a text stream at the first stop string: the one that is complete first, the
// longest of those that are complete together.  So the cut does not depend on how the stream was
// chopped.  Text that may be the beginning of a stop string is held back, at most its length - 1
// bytes. Thread-compatible.

#ifndef TOKENIZER_STOP_MATCHER_H_
#define TOKENIZER_STOP_MATCHER_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tokenizer {

class StopMatcher final {
 public:
  // `include_stop`: keep the matched string in the text.  REQUIRES: no stop string is empty.
  StopMatcher(std::vector<std::string> stops, bool include_stop);

  // Appends text; returns what can be given out now (always whole characters if the input is).
  // After a match: everything before it, and stopped() is true.  Without `may_stop` a stop string
  // that this text completes is text like any other.
  std::string Add(std::string_view text, bool may_stop = true);
  // What was held back, at the end of the stream.
  std::string Finish();
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string> stops_;
  const bool include_stop_;
  std::vector<std::vector<size_t>> borders_;  // [stop][bytes matched]: where a mismatch goes on
  std::vector<size_t> matched_;               // [stop]: bytes of it that end the text seen so far
  std::string held_;                          // as many bytes as the largest of matched_
  bool stopped_ = false;
};

}  // namespace tokenizer

#endif  // TOKENIZER_STOP_MATCHER_H_

// StopMatcher: cuts a text stream at the first stop string.  Text that may be the beginning of a stop
// string is held back, at most its length - 1 bytes.
// Thread-compatible.

#ifndef TOKENIZER_STOP_MATCHER_H_
#define TOKENIZER_STOP_MATCHER_H_

#include <string>
#include <string_view>
#include <vector>

namespace tokenizer {

class StopMatcher final {
 public:
  // `include_stop`: keep the matched string in the text.  REQUIRES: no stop string is empty.
  StopMatcher(std::vector<std::string> stops, bool include_stop);

  // Appends text; returns what can be given out now (always whole characters if the input is).
  // After a match: everything before it, and stopped() is true.
  std::string Add(std::string_view text);
  // What was held back, at the end of the stream.
  std::string Finish();
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string> stops_;
  const bool include_stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace tokenizer

#endif  // TOKENIZER_STOP_MATCHER_H_

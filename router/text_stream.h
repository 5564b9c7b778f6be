// TextStream: one branch's token ids -> the text that the client may see now.  Joins incremental
// detokenising with stop strings: text that may be the beginning of a stop string waits.
//
// Thread-compatible.

#ifndef ROUTER_TEXT_STREAM_H_
#define ROUTER_TEXT_STREAM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "tokenizer/stop_matcher.h"
#include "tokenizer/tokenizer.h"

namespace router {

class TextStream final {
 public:
  struct Options {
    std::vector<std::string> stops = {};
    bool include_stop = false;
    int32_t min_tokens =
        0;  // a stop string that is complete before so many does not end the branch
    // Ids whose text ends the branch and is left out (unless include_stop): EOS and stop ids.
    std::vector<int32_t> stop_ids = {};
    std::vector<int32_t> shown_special_ids = {};  // other special tokens have no text
  };
  struct Piece {
    std::string text;
    int32_t num_tokens = 0;  // of those given: the ones up to the end of the branch
    bool stopped = false;    // by a stop string; later tokens are none of the client's business
  };

  // `tokenizer` may be null (no text, only ids); else it must outlive this object.
  TextStream(const tokenizer::Tokenizer* tokenizer, const Options& options);

  // `ended`: the worker has ended the branch with the last of these ids; `by_stop_id`: because that
  // is a stop id.  Then everything held back is given out. REQUIRES: no earlier piece was the last
  // one.
  Piece Add(absl::Span<const uint32_t> ids, bool ended, bool by_stop_id);

 private:
  // Whether it ends the branch without being seen, or is a special token that is not shown.
  bool IsHidden(int32_t id, bool is_end) const;

  const tokenizer::Tokenizer* const tokenizer_;
  const std::vector<int32_t> stop_ids_;
  const std::vector<int32_t> shown_special_ids_;
  const bool include_stop_;
  const int32_t min_tokens_;
  int32_t num_tokens_ = 0;  // so far
  std::optional<tokenizer::IncrementalDecoder> decoder_;
  std::optional<tokenizer::StopMatcher> matcher_;
};

}  // namespace router

#endif  // ROUTER_TEXT_STREAM_H_

// PreTokenizer: cuts text into the pieces that BPE merges within.  A chain of splits, then the
// byte-level step; each split runs on every piece that the previous one left, and sees nothing but
// that piece.
//
// Thread-safe: const after construction; a Pieces belongs to one thread.

#ifndef TOKENIZER_PRE_TOKENIZER_H_
#define TOKENIZER_PRE_TOKENIZER_H_

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokenizer/regex.h"

namespace tokenizer {

// What becomes of a match and of the text between two matches.
enum class SplitBehavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };

struct SplitRule {
  std::string pattern;
  Regex::Syntax syntax = Regex::Syntax::kPattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between matches is the match
};

struct PreTokenizerRules {
  std::vector<SplitRule> splits;  // in order
  bool add_prefix_space = false;  // a piece that does not start with ' ' gets one
};

// Pieces of one text: views into it, or into `prefixed` where a space was added.
struct Pieces {
  std::vector<std::string_view> pieces;
  std::vector<std::string_view> previous;  // of the step before; scratch
  std::deque<std::string> prefixed;
  RegexScratch regex;
};

class PreTokenizer final {
 public:
  // The pattern that ByteLevel splits by when it says use_regex.
  static const char kByteLevelPattern[];

  // Splits before `num_before_prefix` run before the prefix space is added, the others after it.
  // Errors: kInvalidArgument naming the split and what is wrong with its pattern.
  static absl::StatusOr<PreTokenizer> Create(const PreTokenizerRules& rules,
                                             size_t num_before_prefix);

  // Replaces pieces.pieces by the pieces of `text`; none is empty.
  // Errors: kInvalidArgument if a pattern exceeds its limits on this text.
  // REQUIRES: text is valid UTF-8 and outlives the pieces.
  absl::Status Split(std::string_view text, Pieces& pieces) const;

 private:
  struct Stage {
    Regex regex;
    SplitBehavior behavior;
    bool invert;
  };
  static absl::Status RunStage(const Stage& stage, size_t index, Pieces& pieces);

  std::vector<Stage> stages_;
  size_t num_before_prefix_ = 0;
  bool add_prefix_space_ = false;
};

}  // namespace tokenizer

#endif  // TOKENIZER_PRE_TOKENIZER_H_

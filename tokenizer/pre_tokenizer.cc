#include "tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokenizer/utf8.h"

namespace tokenizer {

const char PreTokenizer::kByteLevelPattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

namespace {

// Takes the parts of one piece from left to right (matches and what lies between them) and puts
// them together as a behavior says.
class PartJoiner {
 public:
  PartJoiner(SplitBehavior behavior, std::string_view piece, std::vector<std::string_view>& out)
      : behavior_(behavior), piece_(piece), out_(out) {}

  void Add(size_t begin, size_t end, bool is_match) {
    switch (behavior_) {
      case SplitBehavior::kIsolated:
        Emit(begin, end);
        return;
      case SplitBehavior::kRemoved:
        if (!is_match) Emit(begin, end);
        return;
      case SplitBehavior::kContiguous:
        Extend(begin, end, is_match == was_match_);
        break;
      case SplitBehavior::kMergedWithPrevious:
        Extend(begin, end, is_match && !was_match_);
        break;
      case SplitBehavior::kMergedWithNext:
        // From the right: a match joins what follows it unless that is a match, too.
        Extend(begin, end, was_match_ && !is_match);
        break;
    }
    was_match_ = is_match;
  }

  void Finish() {
    if (open_) Emit(open_begin_, open_end_);
    open_ = false;
  }

 private:
  void Extend(size_t begin, size_t end, bool join) {
    if (open_ && join) {
      open_end_ = end;
      return;
    }
    Finish();
    open_ = true;
    open_begin_ = begin;
    open_end_ = end;
  }
  void Emit(size_t begin, size_t end) {
    if (begin < end) out_.push_back(piece_.substr(begin, end - begin));
  }

  const SplitBehavior behavior_;
  const std::string_view piece_;
  std::vector<std::string_view>& out_;
  bool was_match_ = false;
  bool open_ = false;  // [open_begin_, open_end_) may still grow
  size_t open_begin_ = 0;
  size_t open_end_ = 0;
};

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Create(const PreTokenizerRules& rules,
                                                  size_t num_before_prefix) {
  PreTokenizer pre_tokenizer;
  pre_tokenizer.num_before_prefix_ = num_before_prefix;
  pre_tokenizer.add_prefix_space_ = rules.add_prefix_space;
  for (const SplitRule& rule : rules.splits) {
    absl::StatusOr<Regex> regex = Regex::Compile(rule.pattern, rule.syntax);
    if (!regex.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("pattern of split ",
                                                     pre_tokenizer.stages_.size(), ": ",
                                                     std::string(regex.status().message())));
    }
    pre_tokenizer.stages_.push_back({*std::move(regex), rule.behavior, rule.invert});
  }
  return pre_tokenizer;
}

absl::Status PreTokenizer::Split(std::string_view text, Pieces& pieces) const {
  pieces.pieces.clear();
  pieces.prefixed.clear();
  if (!text.empty()) pieces.pieces.push_back(text);
  for (size_t i = 0; i <= stages_.size(); ++i) {
    if (i == num_before_prefix_ && add_prefix_space_) {
      for (std::string_view& piece : pieces.pieces) {
        if (piece.front() == ' ') continue;
        piece = pieces.prefixed.emplace_back(absl::StrCat(" ", std::string(piece)));
      }
    }
    if (i == stages_.size()) break;
    if (absl::Status status = RunStage(stages_[i], i, pieces); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PreTokenizer::RunStage(const Stage& stage, size_t index, Pieces& pieces) {
  std::swap(pieces.pieces, pieces.previous);
  pieces.pieces.clear();
  for (const std::string_view piece : pieces.previous) {
    PartJoiner joiner(stage.behavior, piece, pieces.pieces);
    size_t part_begin = 0;  // end of the last match
    size_t from = 0;
    bool any_match = false;
    while (from <= piece.size()) {
      size_t begin = 0, end = 0;
      const Regex::Result result = stage.regex.Find(piece, from, pieces.regex, &begin, &end);
      if (result == Regex::Result::kLimit) {
        return absl::InvalidArgumentError(absl::StrCat("split ", index,
                                                       " of the tokenizer takes too many "
                                                       "steps on ",
                                                       piece.size(), " bytes of this text"));
      }
      if (result == Regex::Result::kNoMatch) break;
      // An empty match right behind the last one is none.
      if (begin == end && any_match && end == part_begin) {
        if (from == piece.size()) break;
        from += CharacterBytes(piece.substr(from));
        continue;
      }
      if (part_begin < begin) joiner.Add(part_begin, begin, stage.invert);
      joiner.Add(begin, end, !stage.invert);
      part_begin = end;
      from = end;
      any_match = true;
    }
    if (part_begin < piece.size()) joiner.Add(part_begin, piece.size(), stage.invert);
    joiner.Finish();
  }
  return absl::OkStatus();
}

}  // namespace tokenizer

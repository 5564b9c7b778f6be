#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace tokenizer {

IncrementalDecoder::IncrementalDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

std::string IncrementalDecoder::Add(int32_t id) {
  std::string text;
  if (skip_special_tokens_ && tokenizer_.IsSpecial(id)) return text;
  pending_ += tokenizer_.TokenBytes(id);
  pending_.erase(0, AppendValidUtf8(pending_, &text));
  return text;
}

std::string IncrementalDecoder::Finish() {
  std::string text(pending_.empty() ? std::string_view() : kReplacementCharacter);
  pending_.clear();
  return text;
}

}  // namespace tokenizer

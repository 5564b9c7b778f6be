#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "tokenizer/regex.h"
#include "tokenizer/utf8.h"

namespace tokenizer {
namespace {

// Unicode's definition of \w, which has no fractions and superscripts (Oniguruma's has).
constexpr char kWordCharacter[] =
    "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200C}\\x{200D}\\x{24B6}-\\x{24E9}]";

bool IsWordCharacter(std::string_view character) {
  static const Regex* const word =
      new Regex(*Regex::Compile(kWordCharacter, Regex::Syntax::kPattern));
  RegexScratch scratch;
  size_t begin = 0, end = 0;
  return word->Find(character, 0, scratch, &begin, &end) == Regex::Result::kMatch;
}

bool EndsWithWord(std::string_view text) {
  if (text.empty()) return false;
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return IsWordCharacter(text.substr(start));
}

bool StartsWithWord(std::string_view text) {
  return !text.empty() && IsWordCharacter(text.substr(0, CharacterBytes(text)));
}

}  // namespace

AddedTokens::AddedTokens(const std::vector<AddedToken>& tokens) {
  for (const AddedToken& token : tokens) {
    if (token.content.empty()) continue;
    (token.normalized ? normalized_ : raw_).Insert(token);
  }
}

void AddedTokens::Trie::Insert(const AddedToken& token) {
  uint32_t node = 0;
  for (const char c : token.content) {
    const uint64_t key = uint64_t{node} << 8 | static_cast<uint8_t>(c);
    const auto [it, is_new] = children_.try_emplace(key, static_cast<uint32_t>(token_at_.size()));
    if (is_new) token_at_.push_back(-1);
    node = it->second;
  }
  first_[static_cast<uint8_t>(token.content[0])] = true;
  token_at_[node] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

int32_t AddedTokens::Trie::LongestAt(std::string_view text, size_t pos) const {
  int32_t longest = -1;
  uint32_t node = 0;
  for (; pos < text.size(); ++pos) {
    const auto it = children_.find(uint64_t{node} << 8 | static_cast<uint8_t>(text[pos]));
    if (it == children_.end()) break;
    node = it->second;
    if (token_at_[node] >= 0) longest = token_at_[node];
  }
  return longest;
}

void AddedTokens::Trie::Split(std::string_view text, std::vector<Part>& parts) const {
  size_t part_begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const int32_t found = first_[static_cast<uint8_t>(text[pos])] ? LongestAt(text, pos) : -1;
    if (found < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[found];
    size_t begin = pos;
    size_t end = pos + token.content.size();
    pos = end;
    if (token.single_word &&
        (EndsWithWord(text.substr(0, begin)) || StartsWithWord(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) {
      while (begin > part_begin) {
        size_t start = begin - 1;
        while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
        if (start < part_begin || !IsWhiteSpace(FirstCharacter(text.substr(start)))) break;
        begin = start;
      }
    }
    if (token.rstrip) {
      while (end < text.size() && IsWhiteSpace(FirstCharacter(text.substr(end)))) {
        end += CharacterBytes(text.substr(end));
      }
    }
    if (part_begin < begin) parts.push_back({text.substr(part_begin, begin - part_begin), -1});
    parts.push_back({text.substr(begin, end - begin), token.id});
    part_begin = end;
  }
  if (part_begin < text.size()) parts.push_back({text.substr(part_begin), -1});
}

std::vector<AddedTokens::Part> AddedTokens::Split(std::string_view text) const {
  std::vector<Part> parts;
  if (raw_.empty()) {
    if (!text.empty()) parts.push_back({text, -1});
  } else {
    raw_.Split(text, parts);
  }
  if (normalized_.empty()) return parts;
  std::vector<Part> result;
  for (const Part& part : parts) {
    if (part.id >= 0) {
      result.push_back(part);
    } else {
      normalized_.Split(part.text, result);
    }
  }
  return result;
}

}  // namespace tokenizer

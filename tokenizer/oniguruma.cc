// TranslateOniguruma: the differences between Oniguruma's Ruby syntax and PCRE2 that tokenizers
// meet.

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "tokenizer/regex.h"

namespace tokenizer {
namespace {

// Unicode's White_Space.  PCRE2's own \s also has U+180E.
constexpr char kSpace[] =
    "\\t-\\r\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{"
    "3000}";
// PCRE2 10.42 has only letters, numbers and the underscore in \w.
constexpr char kWord[] = "\\p{L}\\p{M}\\p{N}\\p{Pc}\\x{24B6}-\\x{24E9}";
constexpr char kHexDigit[] = "0-9A-Fa-f";

absl::Status Unsupported(std::string_view what, size_t offset) {
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(what), " at byte ", offset, " of the pattern is not supported"));
}

// The class that stands behind an escape letter in lower or upper case; nullptr: passed on as it
// is.
const char* ClassOf(char letter) {
  switch (letter) {
    case 's':
    case 'S':
      return kSpace;
    case 'w':
    case 'W':
      return kWord;
    case 'h':
    case 'H':
      return kHexDigit;
    default:
      return nullptr;
  }
}

}  // namespace

absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern) {
  // DeepSeek-V2 splits at \s+$.  Searched for as it stands it is quadratic in a run of spaces that
  // does not end the line: every space of the run is tried.  If the run's first one does not match,
  // or the one where the search begins, no later one does.
  if (pattern == "\\s+$") return absl::StrCat("(?:\\G|(?<![", kSpace, "]))[", kSpace, "]+$");
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char letter = pattern[++i];
      const char* members = ClassOf(letter);
      const bool negated = letter >= 'A' && letter <= 'Z';
      if (members == nullptr) {
        out += c;
        out += letter;
      } else if (!in_class) {
        out += absl::StrCat(negated ? "[^" : "[", members, "]");
      } else if (!negated) {
        out += members;
      } else if (letter == 'H') {
        return Unsupported("\\H in a character class", i - 1);
      } else {
        // Inside a class the complement cannot be spelled; PCRE2's differs in one or a few
        // characters.
        out += c;
        out += letter;
      }
      continue;
    }
    if (in_class) {
      if (c == '[') {
        const size_t end = pattern.find(":]", i);
        if (i + 1 >= pattern.size() || pattern[i + 1] != ':' || end == std::string_view::npos) {
          return Unsupported("a nested character class", i);
        }
        out += pattern.substr(i, end + 2 - i);
        i = end + 1;
        continue;
      }
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') {
        return Unsupported("&& in a character class", i);
      }
      if (c == ']') in_class = false;
    } else if (c == '[') {
      in_class = true;
      out += c;
      // A ']' first in a class is a member of it.
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out += pattern[++i];
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') {
        out += "\\]";
        ++i;
      }
      continue;
    } else if (c == '(' && i + 1 < pattern.size() && pattern[i + 1] == '?') {
      // Ruby's (?m) is PCRE2's (?s); everything else that stands here has the same meaning.
      for (size_t k = i + 2; k < pattern.size() && (pattern[k] == 'i' || pattern[k] == 'm' ||
                                                    pattern[k] == 'x' || pattern[k] == '-');
           ++k) {
        if (pattern[k] == 'm') return Unsupported("(?m)", i);
      }
    }
    out += c;
  }
  return out;
}

}  // namespace tokenizer

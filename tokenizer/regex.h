// Regex: a compiled pattern of a tokenizer.json, matched by PCRE2 with JIT.
//
// Patterns are written for Oniguruma (what the `tokenizers` library runs); what PCRE2 reads
// differently is translated (\s, \w, \h, line anchors) or refused (nested classes, && in a class).
// Thread-safe; a RegexScratch belongs to one thread.

#ifndef TOKENIZER_REGEX_H_
#define TOKENIZER_REGEX_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tokenizer {

// Memory of a match: result, and a JIT stack made when a match asks for more than the thread's own.
class RegexScratch final {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  struct Handles;
  std::unique_ptr<Handles> handles_;
};

class Regex final {
 public:
  enum class Syntax { kPattern, kLiteral };
  enum class Result { kMatch, kNoMatch, kLimit };

  // Errors: kInvalidArgument naming the offset and what is wrong there.
  static absl::StatusOr<Regex> Compile(std::string_view pattern, Syntax syntax);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // The first match that starts at `start` or later.  kLimit: the pattern backtracks too much on
  // this subject.  REQUIRES: subject is valid UTF-8 and start is at a character.
  Result Find(std::string_view subject, size_t start, RegexScratch& scratch, size_t* match_begin,
              size_t* match_end) const;

 private:
  struct Code;
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

// `pattern` in PCRE2's syntax with the same meaning.
// Errors: kInvalidArgument for what has no equal there.
absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern);

}  // namespace tokenizer

#endif  // TOKENIZER_REGEX_H_

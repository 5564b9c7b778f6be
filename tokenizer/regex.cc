#include "tokenizer/regex.h"

#include <array>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace tokenizer {
namespace {

// Bounds what one match may do, so that a pattern that explodes on some text is an error and no
// hang.
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackBytes = 64 << 20;  // reserved, not touched

std::string PcreMessage(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  if (pcre2_get_error_message(code, buffer.data(), buffer.size()) < 0) return absl::StrCat(code);
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

struct RegexScratch::Handles {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = nullptr;

  Handles() {
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, kHeapLimitKib);
  }
  ~Handles() {
    pcre2_match_context_free(context);
    if (stack != nullptr) pcre2_jit_stack_free(stack);
    pcre2_match_data_free(data);
  }
};

RegexScratch::RegexScratch() : handles_(std::make_unique<Handles>()) {}
RegexScratch::~RegexScratch() = default;

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool jit = false;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(std::unique_ptr<Code> code) : code_(std::move(code)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern, Syntax syntax) {
  std::string translated(pattern);
  uint32_t options = PCRE2_UTF;
  if (syntax == Syntax::kLiteral) {
    options |= PCRE2_LITERAL;
  } else {
    ASSIGN_OR_RETURN(translated, TranslateOniguruma(pattern));
    // Oniguruma's ^ and $ always mean lines.
    options |= PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  }
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_unique<Code>();
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             options, &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code->code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(PcreMessage(error), " at byte ", offset, " of ", translated));
  }
  // Where the system forbids executable memory, matching goes on without JIT.
  code->jit = pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE) == 0;
  return Regex(std::move(code));
}

Regex::Result Regex::Find(std::string_view subject, size_t start, RegexScratch& scratch,
                          size_t* match_begin, size_t* match_end) const {
  RegexScratch::Handles& handles = *scratch.handles_;
  const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
  int rc = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit) {
    rc =
        pcre2_jit_match(code_->code, text, subject.size(), start, 0, handles.data, handles.context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && handles.stack == nullptr) {
      handles.stack = pcre2_jit_stack_create(64 << 10, kJitStackBytes, nullptr);
      pcre2_jit_stack_assign(handles.context, nullptr, handles.stack);
      rc = pcre2_jit_match(code_->code, text, subject.size(), start, 0, handles.data,
                           handles.context);
    }
  }
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
    rc = pcre2_match(code_->code, text, subject.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                     handles.data, handles.context);
  }
  if (rc == PCRE2_ERROR_NOMATCH) return Result::kNoMatch;
  if (rc < 0) return Result::kLimit;
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(handles.data);
  *match_begin = bounds[0];
  *match_end = bounds[1];
  return Result::kMatch;
}

}  // namespace tokenizer

// UTF-8: finding what is not valid, and replacing it.
// Thread-safe: functions without state.

#ifndef TOKENIZER_UTF8_H_
#define TOKENIZER_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace tokenizer {

// Offset of the first byte that does not belong to valid UTF-8; text.size() if all of it is valid.
size_t FirstInvalidUtf8(std::string_view text);

// Appends `bytes` to `out` with each maximal invalid part replaced by one U+FFFD, and returns how
// many bytes were used: all, or all but the 1..3 bytes at the end that may begin a character.
size_t AppendValidUtf8(std::string_view bytes, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the character at text[0].  REQUIRES: text is valid and not empty.
size_t CharacterBytes(std::string_view text);
// The character at text[0].  REQUIRES: text is valid and not empty.
char32_t FirstCharacter(std::string_view text);
// The last character.  REQUIRES: as above.
char32_t LastCharacter(std::string_view text);

// Unicode's White_Space property.
bool IsWhiteSpace(char32_t character);

}  // namespace tokenizer

#endif  // TOKENIZER_UTF8_H_

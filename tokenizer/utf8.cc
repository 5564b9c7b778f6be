#include "tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace tokenizer {
namespace {

enum class Part { kValid, kInvalid, kIncomplete };

// What stands at bytes[pos]: its kind and, in `length`, its bytes (of a maximal invalid part at
// least 1).
Part Classify(std::string_view bytes, size_t pos, size_t* length) {
  const auto at = [&bytes](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(pos);
  *length = 1;
  if (lead < 0x80) return Part::kValid;
  // The second byte's range excludes overlong forms, surrogates and what is beyond U+10FFFF.
  size_t count = 0;
  uint8_t low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    count = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    count = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    count = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return Part::kInvalid;
  }
  while (*length < count) {
    if (pos + *length == bytes.size()) return Part::kIncomplete;
    const uint8_t next = at(pos + *length);
    if (next < low || next > high) return Part::kInvalid;
    low = 0x80;
    high = 0xBF;
    ++*length;
  }
  return Part::kValid;
}

// First byte from `pos` on that is not ASCII.
size_t SkipAscii(std::string_view text, size_t pos) {
  while (pos + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + pos, 8);
    if (word & 0x8080808080808080u) break;
    pos += 8;
  }
  while (pos < text.size() && static_cast<uint8_t>(text[pos]) < 0x80) ++pos;
  return pos;
}

}  // namespace

size_t FirstInvalidUtf8(std::string_view text) {
  for (size_t pos = SkipAscii(text, 0); pos < text.size(); pos = SkipAscii(text, pos)) {
    size_t length = 0;
    if (Classify(text, pos, &length) != Part::kValid) return pos;
    pos += length;
  }
  return text.size();
}

size_t AppendValidUtf8(std::string_view bytes, std::string* out) {
  size_t pos = 0;
  while (pos < bytes.size()) {
    const size_t ascii_end = SkipAscii(bytes, pos);
    out->append(bytes.substr(pos, ascii_end - pos));
    pos = ascii_end;
    if (pos == bytes.size()) break;
    size_t length = 0;
    switch (Classify(bytes, pos, &length)) {
      case Part::kValid:
        out->append(bytes.substr(pos, length));
        break;
      case Part::kInvalid:
        out->append(kReplacementCharacter);
        break;
      case Part::kIncomplete:
        return pos;
    }
    pos += length;
  }
  return pos;
}

size_t CharacterBytes(std::string_view text) {
  const auto lead = static_cast<uint8_t>(text[0]);
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

char32_t FirstCharacter(std::string_view text) {
  const size_t length = CharacterBytes(text);
  const auto lead = static_cast<uint8_t>(text[0]);
  if (length == 1) return lead;
  char32_t character = lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    character = (character << 6) | (static_cast<uint8_t>(text[i]) & 0x3F);
  }
  return character;
}

char32_t LastCharacter(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return FirstCharacter(text.substr(start));
}

bool IsWhiteSpace(char32_t character) {
  return (character >= 0x09 && character <= 0x0D) || character == 0x20 || character == 0x85 ||
         character == 0xA0 || character == 0x1680 || (character >= 0x2000 && character <= 0x200A) ||
         character == 0x2028 || character == 0x2029 || character == 0x202F || character == 0x205F ||
         character == 0x3000;
}

}  // namespace tokenizer

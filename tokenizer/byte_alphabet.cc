#include "tokenizer/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "tokenizer/utf8.h"

namespace tokenizer {
namespace {

// Every character of the alphabet is below this.
constexpr int kMaxCharacter = 0x144;

struct Alphabet {
  std::array<uint16_t, 256> character;        // by byte
  std::array<int16_t, kMaxCharacter> byte{};  // by character; -1: none
};

Alphabet MakeAlphabet() {
  Alphabet alphabet;
  alphabet.byte.fill(-1);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const int character = printable ? byte : next++;
    alphabet.character[byte] = static_cast<uint16_t>(character);
    alphabet.byte[character] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

const Alphabet& TheAlphabet() {
  static const Alphabet alphabet = MakeAlphabet();
  return alphabet;
}

}  // namespace

std::string SpellBytes(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    const uint16_t character = TheAlphabet().character[static_cast<uint8_t>(c)];
    if (character < 0x80) {
      out.push_back(static_cast<char>(character));
    } else {
      out.push_back(static_cast<char>(0xC0 | (character >> 6)));
      out.push_back(static_cast<char>(0x80 | (character & 0x3F)));
    }
  }
  return out;
}

std::optional<std::string> UnspellBytes(std::string_view spelled) {
  std::string out;
  while (!spelled.empty()) {
    const char32_t character = FirstCharacter(spelled);
    if (character >= kMaxCharacter || TheAlphabet().byte[character] < 0) return std::nullopt;
    out.push_back(static_cast<char>(TheAlphabet().byte[character]));
    spelled.remove_prefix(CharacterBytes(spelled));
  }
  return out;
}

}  // namespace tokenizer

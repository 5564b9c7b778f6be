// The byte-level alphabet: the 256 printable characters under which tokenizer.json spells bytes.
// Printable bytes of Latin-1 stand for themselves, the others are U+0100, U+0101, ... in order.
// Thread-safe: functions without state.
// Source: the GPT-2 encoder, which every byte-level BPE follows.

#ifndef TOKENIZER_BYTE_ALPHABET_H_
#define TOKENIZER_BYTE_ALPHABET_H_

#include <optional>
#include <string>
#include <string_view>

namespace tokenizer {

std::string SpellBytes(std::string_view bytes);

// The bytes that `spelled` stands for, or nullopt if a character is not in the alphabet.
// REQUIRES: valid UTF-8.
std::optional<std::string> UnspellBytes(std::string_view spelled);

}  // namespace tokenizer

#endif  // TOKENIZER_BYTE_ALPHABET_H_

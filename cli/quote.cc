#include "cli/quote.h"

#include <cstdint>

#include "tokenizer/utf8.h"

namespace cli {

std::string Quote(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  const auto escape = [&out](uint8_t byte) {
    out += "\\x";
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  };
  while (!bytes.empty()) {
    const size_t valid = tokenizer::FirstInvalidUtf8(bytes);
    for (const char c : bytes.substr(0, valid)) {
      const auto byte = static_cast<uint8_t>(c);
      if (c == '"' || c == '\\') {
        out += '\\';
        out += c;
      } else if (c == '\n') {
        out += "\\n";
      } else if (c == '\t') {
        out += "\\t";
      } else if (c == '\r') {
        out += "\\r";
      } else if (byte < 0x20 || byte == 0x7F) {
        escape(byte);
      } else {
        out += c;
      }
    }
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    escape(static_cast<uint8_t>(bytes[0]));
    bytes.remove_prefix(1);
  }
  out += '"';
  return out;
}

}  // namespace cli

// AddedTokens: finds the added tokens (special or not) that are written in a text, before anything
// else looks at it.  At each place the longest one wins; matches do not overlap.
//
// Thread-safe: const after construction.

#ifndef TOKENIZER_ADDED_TOKENS_H_
#define TOKENIZER_ADDED_TOKENS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tokenizer {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space behind it along
  bool normalized = false;   // looked for in what the others left
};

class AddedTokens final {
 public:
  AddedTokens() = default;
  explicit AddedTokens(const std::vector<AddedToken>& tokens);

  // A stretch of the text that is one added token, or (id -1) has none in it.
  struct Part {
    std::string_view text;
    int32_t id = -1;
  };
  // The parts of `text` in order; none without id is empty.  REQUIRES: text is valid UTF-8.
  std::vector<Part> Split(std::string_view text) const;

 private:
  // Tokens of one pass, as a trie over bytes.
  class Trie {
   public:
    void Insert(const AddedToken& token);
    void Split(std::string_view text, std::vector<Part>& parts) const;
    bool empty() const { return tokens_.empty(); }

   private:
    // Index into tokens_ of the longest token at text[pos], or -1.
    int32_t LongestAt(std::string_view text, size_t pos) const;

    std::vector<AddedToken> tokens_;
    std::array<bool, 256> first_{};                     // bytes that begin a token
    absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node; root is 0
    std::vector<int32_t> token_at_{-1};                 // by node: token that ends there
  };

  Trie raw_;         // normalized == false: looked for first
  Trie normalized_;  // looked for in what is left
};

}  // namespace tokenizer

#endif  // TOKENIZER_ADDED_TOKENS_H_

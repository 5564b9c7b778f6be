// Tokenizer: text <-> token ids as a Hugging Face tokenizer.json says (byte-level BPE; Split,
// Sequence, Digits and ByteLevel pre-tokenizers; added and special tokens).  Equal to the
// `tokenizers` library.
//
// Thread-safe: const after Load.

#ifndef TOKENIZER_TOKENIZER_H_
#define TOKENIZER_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tokenizer {

class Tokenizer {
 public:
  // `model_dir` holds tokenizer.json and, optionally, tokenizer_config.json (whether BOS is added).
  // Errors: kNotFound; kInvalidArgument naming the file, the member and what is not supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  virtual ~Tokenizer() = default;

  // Special tokens written in the text are recognised.  `add_special_tokens` puts BOS in front
  // where the checkpoint's configuration says so. Errors: kInvalidArgument for invalid UTF-8, with
  // the byte offset.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                                      bool add_special_tokens) const = 0;

  // Invalid UTF-8 in the result becomes U+FFFD.  Ids out of range are kInvalidArgument.
  virtual absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                             bool skip_special_tokens) const = 0;

  // The bytes of one token; "" for an id that has none.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
  // -1 if there is no such token.
  virtual int32_t TokenId(std::string_view token) const = 0;

  virtual int32_t vocab_size() const = 0;  // largest id + 1
  virtual int32_t bos_id() const = 0;      // -1: none
  // Hex XXH3-128 of tokenizer.json's bytes: router and workers compare it.
  virtual const std::string& hash() const = 0;
};

// Turns a stream of ids into text, never giving out half a character.
// Thread-compatible; `tokenizer` must outlive it.
class IncrementalDecoder {
 public:
  explicit IncrementalDecoder(const Tokenizer& tokenizer, bool skip_special_tokens);

  // Text that became whole with this token (may be "").
  std::string Add(int32_t id);
  // What is left at the end; half a character becomes U+FFFD.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_tokens_;
  std::string pending_;  // bytes of a character that is not whole yet
};

// Hex XXH3-128 of DIR/tokenizer.json, "" if there is none.  What Tokenizer::hash() returns, without
// loading it.  Errors: kInvalidArgument if it cannot be read.
absl::StatusOr<std::string> TokenizerHash(const std::string& model_dir);

}  // namespace tokenizer

#endif  // TOKENIZER_TOKENIZER_H_

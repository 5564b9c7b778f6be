// A tokenizer.json small enough to reason about: one token per byte, and what a test adds.

#ifndef TESTS_TOKENIZER_TINY_TOKENIZER_H_
#define TESTS_TOKENIZER_TINY_TOKENIZER_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "tokenizer/tokenizer.h"

namespace tokenizer {

// A directory that is removed with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  void Write(const std::string& name, const std::string& bytes) const;

 private:
  std::string path_;
};

// Byte b has the id b; no merges; a Sequence with ByteLevel (no regex, no prefix space) only.
nlohmann::json TinyTokenizer();
// Adds the token left + right with the next free id, and its merge.
void AddMerge(nlohmann::json& tokenizer, const std::string& left, const std::string& right);

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFrom(
    const std::string& tokenizer_json, const std::optional<std::string>& config_json = {});
// REQUIRES: it loads.
std::unique_ptr<Tokenizer> Make(const nlohmann::json& tokenizer,
                                const std::optional<std::string>& config_json = {});

// DeepSeek-V3's, loaded once.
const Tokenizer& DeepSeekV3();
std::string GoldenDir();
std::string ReadText(const std::string& path);

}  // namespace tokenizer

#endif  // TESTS_TOKENIZER_TINY_TOKENIZER_H_

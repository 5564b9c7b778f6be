// TokenizerFile: what a tokenizer.json (and the tokenizer_config.json beside it) says, checked.
// Plain data; the reader knows JSON, nothing else here does.

#ifndef TOKENIZER_TOKENIZER_FILE_H_
#define TOKENIZER_TOKENIZER_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe_model.h"
#include "tokenizer/pre_tokenizer.h"

namespace tokenizer {

// Ids at or above this are taken for damage, not for a vocabulary.
inline constexpr int64_t kMaxTokenId = int64_t{1} << 24;

struct TokenizerFile {
  std::vector<std::string> spelled;  // by id, as the file spells it; "" for ids that are not used
  std::vector<std::string> merge_bytes;  // by id, for ids of the model's vocabulary, else ""
  std::vector<BpeModel::Merge> merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added_tokens;
  PreTokenizerRules pre_tokenizer;
  size_t num_splits_before_prefix = 0;
  std::vector<int32_t> prefix_ids;  // put in front of a prompt
  int32_t bos_id = -1;
};

// `json`: the bytes of tokenizer.json.  `config_json`: of tokenizer_config.json, "{}" when there is
// none.  Errors: kInvalidArgument naming the file, the member, what was found and what is
// supported.
absl::StatusOr<TokenizerFile> ParseTokenizerFile(std::string_view json,
                                                 std::string_view config_json);

}  // namespace tokenizer

#endif  // TOKENIZER_TOKENIZER_FILE_H_

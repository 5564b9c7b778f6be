// The Tokenizer that a model directory's tokenizer.json describes.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "input_file/input_file.h"
#include "status/status_macros.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe_model.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_file.h"
#include "tokenizer/utf8.h"

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace tokenizer {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{256} << 20;

std::string Hash(std::string_view bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const unsigned char byte : canonical.digest) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

class HfTokenizer final : public Tokenizer {
 public:
  HfTokenizer(TokenizerFile file, PreTokenizer pre_tokenizer, std::string hash)
      : added_tokens_(file.added_tokens),
        pre_tokenizer_(std::move(pre_tokenizer)),
        model_(file.merge_bytes, file.merges, file.ignore_merges),
        prefix_ids_(std::move(file.prefix_ids)),
        bos_id_(file.bos_id),
        hash_(std::move(hash)) {
    const size_t size = file.spelled.size();
    bytes_.reserve(size);
    special_.resize(size);
    ids_.reserve(size);
    for (size_t id = 0; id < size; ++id) {
      const std::string& spelled = file.spelled[id];
      // A token with a character outside the alphabet stands for its own text.
      bytes_.push_back(UnspellBytes(spelled).value_or(spelled));
      if (!spelled.empty()) ids_.emplace(spelled, static_cast<int32_t>(id));
    }
    for (const AddedToken& token : file.added_tokens) special_[token.id] = token.special;
  }

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              bool add_special_tokens) const override;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     bool skip_special_tokens) const override;

  std::string_view TokenBytes(int32_t id) const override {
    return InRange(id) ? std::string_view(bytes_[id]) : std::string_view();
  }
  bool IsSpecial(int32_t id) const override { return InRange(id) && special_[id]; }
  int32_t TokenId(std::string_view token) const override {
    const auto it = ids_.find(absl::string_view(token.data(), token.size()));
    return it == ids_.end() ? -1 : it->second;
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(bytes_.size()); }
  int32_t bos_id() const override { return bos_id_; }
  const std::string& hash() const override { return hash_; }

 private:
  bool InRange(int32_t id) const { return id >= 0 && id < vocab_size(); }

  const AddedTokens added_tokens_;
  const PreTokenizer pre_tokenizer_;
  const BpeModel model_;
  const std::vector<int32_t> prefix_ids_;
  const int32_t bos_id_;
  const std::string hash_;
  std::vector<std::string> bytes_;                 // by id; "" for ids that are not used
  std::vector<bool> special_;                      // by id
  absl::flat_hash_map<std::string, int32_t> ids_;  // by spelling
};

absl::StatusOr<std::vector<int32_t>> HfTokenizer::Encode(std::string_view text,
                                                         bool add_special_tokens) const {
  if (const size_t invalid = FirstInvalidUtf8(text); invalid < text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("text is not valid UTF-8 at byte ", invalid));
  }
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  Pieces pieces;
  BpeModel::Scratch scratch;
  for (const AddedTokens::Part& part : added_tokens_.Split(text)) {
    if (part.id >= 0) {
      ids.push_back(part.id);
      continue;
    }
    RETURN_IF_ERROR(pre_tokenizer_.Split(part.text, pieces));
    for (const std::string_view piece : pieces.pieces) model_.Encode(piece, scratch, ids);
  }
  // A prompt has one BOS: a text that begins with it (a rendered chat) gets no second one.
  const bool has_bos = !ids.empty() && !prefix_ids_.empty() && ids[0] == prefix_ids_[0];
  if (add_special_tokens && !has_bos)
    ids.insert(ids.begin(), prefix_ids_.begin(), prefix_ids_.end());
  return ids;
}

absl::StatusOr<std::string> HfTokenizer::Decode(absl::Span<const int32_t> ids,
                                                bool skip_special_tokens) const {
  std::string bytes;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!InRange(ids[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", ids[i], " at ", i, " is not in [0, ", vocab_size(), ")"));
    }
    if (!skip_special_tokens || !special_[ids[i]]) bytes += bytes_[ids[i]];
  }
  std::string text;
  if (AppendValidUtf8(bytes, &text) < bytes.size()) text += kReplacementCharacter;
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/tokenizer.json");
  ASSIGN_OR_RETURN(const std::string json, input_file::Read(path, kMaxFileBytes));
  absl::StatusOr<std::string> config =
      input_file::Read(absl::StrCat(model_dir, "/tokenizer_config.json"), kMaxFileBytes);
  if (absl::IsNotFound(config.status())) config = "{}";
  RETURN_IF_ERROR(config.status());
  const auto in_directory = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(model_dir, "/", std::string(status.message())));
  };
  absl::StatusOr<TokenizerFile> file = ParseTokenizerFile(json, *config);
  if (!file.ok()) return in_directory(file.status());
  absl::StatusOr<PreTokenizer> pre_tokenizer =
      PreTokenizer::Create(file->pre_tokenizer, file->num_splits_before_prefix);
  if (!pre_tokenizer.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", std::string(pre_tokenizer.status().message())));
  }
  return std::make_unique<HfTokenizer>(*std::move(file), *std::move(pre_tokenizer), Hash(json));
}

absl::StatusOr<std::string> TokenizerHash(const std::string& model_dir) {
  const absl::StatusOr<std::string> json =
      input_file::Read(absl::StrCat(model_dir, "/tokenizer.json"), kMaxFileBytes);
  if (absl::IsNotFound(json.status())) return "";
  RETURN_IF_ERROR(json.status());
  return Hash(*json);
}

}  // namespace tokenizer

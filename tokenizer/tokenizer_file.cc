#include "tokenizer/tokenizer_file.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/json_value.h"
#include "tokenizer/utf8.h"

namespace tokenizer {
namespace {

using nlohmann::json;

constexpr char kFile[] = "tokenizer.json";
constexpr char kConfigFile[] = "tokenizer_config.json";

class Reader {
 public:
  absl::StatusOr<TokenizerFile> Read(const json& root, const json& config);

 private:
  absl::Status ReadModel(const json& model);
  absl::Status ReadMerges(const json& merges);
  absl::Status ReadAddedTokens(const json& tokens);
  absl::Status CheckNormalizer(const json& normalizer, const std::string& where);
  absl::Status CheckDecoder(const json& decoder, const std::string& where);
  absl::Status ReadPreTokenizer(const json& pre_tokenizer, const std::string& where);
  absl::Status ReadSplit(const json& split, const std::string& where);
  absl::Status ReadPostProcessor(const json& processor, const std::string& where);
  absl::Status ReadConfig(const json& config);
  absl::Status SetToken(int32_t id, const std::string& spelled, const std::string& where);

  TokenizerFile file_;
  absl::flat_hash_map<std::string, int32_t> ids_;
  bool has_byte_level_ = false;
};

absl::Status Reader::SetToken(int32_t id, const std::string& spelled, const std::string& where) {
  if (static_cast<size_t>(id) >= file_.spelled.size()) {
    file_.spelled.resize(id + 1);
    file_.merge_bytes.resize(id + 1);
  }
  const auto [it, is_new] = ids_.try_emplace(spelled, id);
  if (!is_new && it->second != id) {
    return Bad(where, ": \"", spelled, "\" has the ids ", it->second, " and ", id);
  }
  if (!is_new) return absl::OkStatus();
  if (!file_.spelled[id].empty()) {
    return Bad(where, ": id ", id, " is \"", file_.spelled[id], "\" and \"", spelled, "\"");
  }
  file_.spelled[id] = spelled;
  return absl::OkStatus();
}

absl::Status Reader::ReadModel(const json& model) {
  const std::string where = absl::StrCat(kFile, ": model");
  std::string type = "BPE";  // files of old have no type
  if (model.is_object() && Member(model, "type") == nullptr && Member(model, "merges") != nullptr) {
  } else {
    ASSIGN_OR_RETURN(type, Type(model, where));
  }
  if (type != "BPE") return Bad(where, ".type: only BPE is supported, found ", type);
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* value = Member(model, name);
    if (value != nullptr && *value != "") {
      return Bad(where, ".", name, ": not supported, found ", Shown(*value));
    }
  }
  if (const json* dropout = Member(model, "dropout"); dropout != nullptr && *dropout != 0) {
    return Bad(where, ".dropout: not supported, found ", Shown(*dropout));
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, Bool(model, "byte_fallback", where, false));
  if (byte_fallback) return Bad(where, ".byte_fallback: not supported");
  ASSIGN_OR_RETURN(file_.ignore_merges, Bool(model, "ignore_merges", where, false));

  const json* vocab = Member(model, "vocab");
  if (vocab == nullptr) return Bad(where, ".vocab: missing");
  if (!vocab->is_object()) return Bad(where, ".vocab: need an object, found ", vocab->type_name());
  ids_.reserve(vocab->size());
  for (const auto& [token, value] : vocab->items()) {
    const std::string entry = absl::StrCat(where, ".vocab[\"", token, "\"]");
    ASSIGN_OR_RETURN(const int32_t id, Id(value, entry));
    if (token.empty()) return Bad(entry, ": an empty token");
    RETURN_IF_ERROR(SetToken(id, token, entry));
    if (std::optional<std::string> bytes = UnspellBytes(token))
      file_.merge_bytes[id] = *std::move(bytes);
  }
  // Bytes that valid UTF-8 never has may be absent.
  for (int byte = 0; byte < 256; ++byte) {
    if (byte == 0xC0 || byte == 0xC1 || byte > 0xF4) continue;
    const std::string spelled = SpellBytes(std::string(1, static_cast<char>(byte)));
    if (!ids_.contains(spelled)) {
      return Bad(where, ".vocab: no token for byte ", byte, " (\"", spelled, "\")");
    }
  }
  const json* merges = Member(model, "merges");
  if (merges == nullptr) return Bad(where, ".merges: missing");
  return ReadMerges(*merges);
}

absl::Status Reader::ReadMerges(const json& merges) {
  const std::string where = absl::StrCat(kFile, ": model.merges");
  if (!merges.is_array()) return Bad(where, ": need an array, found ", merges.type_name());
  file_.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const json& merge = merges[i];
    std::string left, right;
    if (merge.is_string()) {
      // "a b": neither side has a space, which the alphabet spells otherwise.
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return Bad(where, "[", i, "]: need \"left right\", found ", Shown(merge));
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      return Bad(where, "[", i, "]: need \"left right\" or [left, right], found ", Shown(merge));
    }
    BpeModel::Merge ids{};
    for (const auto& [token, id] : {std::pair<std::string, int32_t*>{left, &ids.left},
                                    {right, &ids.right},
                                    {left + right, &ids.merged}}) {
      const auto it = ids_.find(token);
      if (it == ids_.end())
        return Bad(where, "[", i, "]: \"", token, "\" is not in the vocabulary");
      *id = it->second;
    }
    file_.merges.push_back(ids);
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadAddedTokens(const json& tokens) {
  const std::string where = absl::StrCat(kFile, ": added_tokens");
  if (!tokens.is_array()) return Bad(where, ": need an array, found ", tokens.type_name());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string entry = absl::StrCat(where, "[", i, "]");
    const json& value = tokens[i];
    if (!value.is_object()) return Bad(entry, ": need an object, found ", Shown(value));
    AddedToken token;
    const json* id = Member(value, "id");
    if (id == nullptr) return Bad(entry, ".id: missing");
    ASSIGN_OR_RETURN(token.id, Id(*id, entry + ".id"));
    ASSIGN_OR_RETURN(token.content, String(value, "content", entry));
    if (token.content.empty()) return Bad(entry, ".content: empty");
    ASSIGN_OR_RETURN(token.special, Bool(value, "special", entry, false));
    ASSIGN_OR_RETURN(token.single_word, Bool(value, "single_word", entry, false));
    ASSIGN_OR_RETURN(token.lstrip, Bool(value, "lstrip", entry, false));
    ASSIGN_OR_RETURN(token.rstrip, Bool(value, "rstrip", entry, false));
    ASSIGN_OR_RETURN(token.normalized, Bool(value, "normalized", entry, !token.special));
    RETURN_IF_ERROR(SetToken(token.id, token.content, entry));
    file_.added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckNormalizer(const json& normalizer, const std::string& where) {
  ASSIGN_OR_RETURN(const std::string type, Type(normalizer, where));
  if (type != "Sequence") return Bad(where, ": the normalizer ", type, " is not supported");
  const json* members = Member(normalizer, "normalizers");
  if (members == nullptr || !members->is_array()) return Bad(where, ".normalizers: need an array");
  for (const json& member : *members)
    RETURN_IF_ERROR(CheckNormalizer(member, where + ".normalizers"));
  return absl::OkStatus();
}

absl::Status Reader::CheckDecoder(const json& decoder, const std::string& where) {
  ASSIGN_OR_RETURN(const std::string type, Type(decoder, where));
  if (type == "ByteLevel") return absl::OkStatus();
  const json* members = Member(decoder, "decoders");
  if (type != "Sequence" || members == nullptr || !members->is_array() || members->size() != 1) {
    return Bad(where, ": only ByteLevel is supported, found ", Shown(decoder));
  }
  return CheckDecoder((*members)[0], where + ".decoders");
}

absl::Status Reader::ReadPreTokenizer(const json& pre_tokenizer, const std::string& where) {
  ASSIGN_OR_RETURN(const std::string type, Type(pre_tokenizer, where));
  // What follows ByteLevel would see its alphabet instead of text.
  if (has_byte_level_) return Bad(where, ": ", type, " after ByteLevel is not supported");
  PreTokenizerRules& rules = file_.pre_tokenizer;
  if (type == "Sequence") {
    const json* members = Member(pre_tokenizer, "pretokenizers");
    if (members == nullptr || !members->is_array())
      return Bad(where, ".pretokenizers: need an array");
    for (size_t i = 0; i < members->size(); ++i) {
      RETURN_IF_ERROR(
          ReadPreTokenizer((*members)[i], absl::StrCat(where, ".pretokenizers[", i, "]")));
    }
    return absl::OkStatus();
  }
  if (type == "Split") return ReadSplit(pre_tokenizer, where);
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, Bool(pre_tokenizer, "individual_digits", where, false));
    rules.splits.push_back({"\\p{N}", Regex::Syntax::kPattern,
                            individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                            false});
    return absl::OkStatus();
  }
  if (type == "ByteLevel") {
    has_byte_level_ = true;
    file_.num_splits_before_prefix = rules.splits.size();
    ASSIGN_OR_RETURN(rules.add_prefix_space, Bool(pre_tokenizer, "add_prefix_space", where, true));
    ASSIGN_OR_RETURN(const bool use_regex, Bool(pre_tokenizer, "use_regex", where, true));
    if (use_regex) rules.splits.push_back({.pattern = PreTokenizer::kByteLevelPattern});
    return absl::OkStatus();
  }
  return Bad(where, ": the pre-tokenizer ", type, " is not supported");
}

absl::Status Reader::ReadSplit(const json& split, const std::string& where) {
  static constexpr std::pair<const char*, SplitBehavior> kBehaviors[] = {
      {"Isolated", SplitBehavior::kIsolated},
      {"Removed", SplitBehavior::kRemoved},
      {"Contiguous", SplitBehavior::kContiguous},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext}};
  SplitRule rule;
  const json* pattern = Member(split, "pattern");
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1) {
    return Bad(where, ".pattern: need {\"Regex\": ...} or {\"String\": ...}");
  }
  if (Member(*pattern, "String") != nullptr) {
    rule.syntax = Regex::Syntax::kLiteral;
    ASSIGN_OR_RETURN(rule.pattern, String(*pattern, "String", where + ".pattern"));
  } else {
    ASSIGN_OR_RETURN(rule.pattern, String(*pattern, "Regex", where + ".pattern"));
  }
  ASSIGN_OR_RETURN(const std::string behavior, String(split, "behavior", where));
  bool known = false;
  for (const auto& [name, value] : kBehaviors) {
    if (behavior != name) continue;
    rule.behavior = value;
    known = true;
  }
  if (!known) return Bad(where, ".behavior: \"", behavior, "\" is not known");
  ASSIGN_OR_RETURN(rule.invert, Bool(split, "invert", where, false));
  file_.pre_tokenizer.splits.push_back(std::move(rule));
  return absl::OkStatus();
}

// Of a template only what stands before the text counts: a prompt has nothing behind it.
absl::Status Reader::ReadPostProcessor(const json& processor, const std::string& where) {
  ASSIGN_OR_RETURN(const std::string type, Type(processor, where));
  if (type == "ByteLevel") return absl::OkStatus();
  if (type == "Sequence") {
    const json* members = Member(processor, "processors");
    if (members == nullptr || !members->is_array()) return Bad(where, ".processors: need an array");
    for (size_t i = 0; i < members->size(); ++i) {
      RETURN_IF_ERROR(
          ReadPostProcessor((*members)[i], absl::StrCat(where, ".processors[", i, "]")));
    }
    return absl::OkStatus();
  }
  if (type != "TemplateProcessing") {
    return Bad(where, ": the post-processor ", type, " is not supported");
  }
  const json* single = Member(processor, "single");
  if (single == nullptr || !single->is_array()) return Bad(where, ".single: need an array");
  bool text_seen = false;
  for (const json& item : *single) {
    const json* special = item.is_object() ? Member(item, "SpecialToken") : nullptr;
    if (special == nullptr) {
      if (!item.is_object() || Member(item, "Sequence") == nullptr || text_seen) {
        return Bad(where, ".single: need special tokens and then one Sequence, found ",
                   Shown(*single));
      }
      text_seen = true;
      continue;
    }
    if (text_seen) return Bad(where, ".single: tokens behind the text are not supported");
    if (!special->is_object())
      return Bad(where, ".single: need an object, found ", Shown(*special));
    ASSIGN_OR_RETURN(const std::string name, String(*special, "id", where + ".single"));
    const auto it = ids_.find(name);
    if (it == ids_.end()) return Bad(where, ".single: \"", name, "\" is not a token");
    file_.prefix_ids.push_back(it->second);
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadConfig(const json& config) {
  const std::string where = absl::StrCat(kConfigFile, ":");
  std::string bos;
  if (const json* token = Member(config, "bos_token"); token != nullptr) {
    if (token->is_string()) {
      bos = token->get<std::string>();
    } else if (token->is_object()) {
      ASSIGN_OR_RETURN(bos, String(*token, "content", absl::StrCat(kConfigFile, ": bos_token")));
    } else {
      return Bad(where, " bos_token: need a string or an object, found ", Shown(*token));
    }
    const auto it = ids_.find(bos);
    if (it == ids_.end()) return Bad(where, " bos_token: \"", bos, "\" is not a token of ", kFile);
    file_.bos_id = it->second;
  } else if (!file_.prefix_ids.empty()) {
    file_.bos_id = file_.prefix_ids[0];
  }
  if (Member(config, "add_bos_token") == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool add_bos, Bool(config, "add_bos_token", kConfigFile, false));
  if (add_bos && file_.bos_id < 0)
    return Bad(where, " add_bos_token is true and there is no bos_token");
  file_.prefix_ids.clear();
  if (add_bos) file_.prefix_ids.push_back(file_.bos_id);
  return absl::OkStatus();
}

absl::StatusOr<TokenizerFile> Reader::Read(const json& root, const json& config) {
  const json* model = Member(root, "model");
  if (model == nullptr) return Bad(kFile, ": model: missing");
  RETURN_IF_ERROR(ReadModel(*model));
  if (const json* tokens = Member(root, "added_tokens")) RETURN_IF_ERROR(ReadAddedTokens(*tokens));
  const auto where = [](const char* member) { return absl::StrCat(kFile, ": ", member); };
  if (const json* normalizer = Member(root, "normalizer")) {
    RETURN_IF_ERROR(CheckNormalizer(*normalizer, where("normalizer")));
  }
  if (const json* pre_tokenizer = Member(root, "pre_tokenizer")) {
    RETURN_IF_ERROR(ReadPreTokenizer(*pre_tokenizer, where("pre_tokenizer")));
  }
  if (!has_byte_level_)
    return Bad(kFile, ": pre_tokenizer: only byte-level BPE is supported, found no ByteLevel");
  if (const json* decoder = Member(root, "decoder")) {
    RETURN_IF_ERROR(CheckDecoder(*decoder, where("decoder")));
  }
  if (const json* processor = Member(root, "post_processor")) {
    RETURN_IF_ERROR(ReadPostProcessor(*processor, where("post_processor")));
  }
  RETURN_IF_ERROR(ReadConfig(config));
  return std::move(file_);
}

}  // namespace

absl::StatusOr<TokenizerFile> ParseTokenizerFile(std::string_view text,
                                                 std::string_view config_text) {
  ASSIGN_OR_RETURN(const json root, ParseObject(text, kFile));
  ASSIGN_OR_RETURN(const json config, ParseObject(config_text, kConfigFile));
  return Reader().Read(root, config);
}

}  // namespace tokenizer

#include "chat/format.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "chat/markers.h"
#include "chat/text.h"
#include "input_file/input_file.h"
#include "input_file/json_file.h"
#include "status/status_macros.h"

namespace chat {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxFileBytes = int64_t{16} << 20;

constexpr std::array<std::pair<std::string_view, Format>, 8> kNames = {{
    {"v2", Format::kV2},
    {"v3", Format::kV3},
    {"r1", Format::kR1},
    {"v3-0324", Format::kV3_0324},
    {"r1-0528", Format::kR1_0528},
    {"v3.1", Format::kV31},
    {"v3.2", Format::kV32},
    {"v4", Format::kV4},
}};

std::string Names() {
  return absl::StrJoin(kNames, ", ",
                       [](std::string* out, const auto& one) { out->append(one.first); });
}

// The template and the file that holds it; nothing if the checkpoint has none.
struct Template {
  std::string text;
  std::string file;
};
absl::StatusOr<std::optional<Template>> ReadTemplate(const std::filesystem::path& dir) {
  const std::filesystem::path jinja = dir / "chat_template.jinja";
  if (input_file::IsThere(jinja.string())) {
    ASSIGN_OR_RETURN(std::string text, input_file::Read(jinja.string(), kMaxFileBytes));
    return Template{std::move(text), jinja.string()};
  }
  const std::filesystem::path config_path = dir / "tokenizer_config.json";
  if (!input_file::IsThere(config_path.string())) return std::nullopt;
  ASSIGN_OR_RETURN(const Json config, input_file::ReadJsonObject(config_path.string()));
  Json value = config.value("chat_template", Json());
  if (value.is_array()) {  // named ones
    Json chosen;
    for (const Json& one : value) {
      if (one.is_object() && one.value("name", Json()) == "default") {
        chosen = one.value("template", Json());
      }
    }
    value = std::move(chosen);
  }
  if (!value.is_string()) return std::nullopt;
  return Template{value.get<std::string>(), config_path.string()};
}

// Every "<｜...｜>" and "<|...|>" that a template writes.
std::vector<std::string_view> MarkersIn(std::string_view text) {
  std::vector<std::string_view> markers;
  for (const auto& [open, close] :
       {std::pair<std::string_view, std::string_view>{"<｜", "｜>"}, {"<|", "|>"}}) {
    for (size_t at = text.find(open); at != text.npos; at = text.find(open, at + 1)) {
      const size_t end = text.find(close, at + open.size());
      if (end == text.npos) break;
      markers.push_back(text.substr(at, end + close.size() - at));
    }
  }
  return markers;
}

bool IsMarkerOfV3(std::string_view marker) {
  for (const std::string_view known :
       {kBos, kEos, kUser, kAssistant, kCallsBegin, kCallsEnd, kCallBegin, kCallEnd, kSep,
        kOutputsBegin, kOutputsEnd, kOutputBegin, kOutputEnd}) {
    if (marker == known) return true;
  }
  return false;
}

}  // namespace

std::string_view FormatName(Format format) {
  for (const auto& [name, known] : kNames) {
    if (known == format) return name;
  }
  return "";
}

absl::StatusOr<Format> FormatFromName(std::string_view name) {
  for (const auto& [known, format] : kNames) {
    if (known == name) return format;
  }
  return absl::InvalidArgumentError(Concat("chat format \"", name, "\" is none of ", Names()));
}

absl::StatusOr<Format> FormatOfTemplate(std::string_view text) {
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  const auto unknown = [](std::string_view why) {
    return absl::InvalidArgumentError(Concat("chat_template is none that Ferry knows: ", why));
  };
  if (has("'User: '") && has("'Assistant: '")) {
    if (!MarkersIn(text).empty()) return unknown("it writes \"User: \" and special tokens");
    return Format::kV2;
  }
  for (const std::string_view needed : {kUser, kAssistant, kEos}) {
    if (!has(needed)) return unknown(Concat("it does not write ", needed));
  }
  for (const std::string_view marker : MarkersIn(text)) {
    if (!IsMarkerOfV3(marker)) return unknown(Concat("it writes ", marker));
  }
  if (has(kDsml)) return unknown(Concat("it writes ", kDsml));
  // V3.1 alone writes </think>; R1 cuts answers at it.
  const bool cuts = has("split('</think>')[-1]");
  if (has("'<｜Assistant｜></think>'") || has("'</think>'}}")) return Format::kV31;
  if (has("message['content'] + '<｜Assistant｜>'") || has("content + '<｜Assistant｜>'")) {
    return cuts ? Format::kR1_0528 : Format::kV3_0324;
  }
  if (has("<｜Assistant｜><think>\\n")) {
    if (!cuts) return unknown("it opens <think> and keeps earlier reasoning");
    return Format::kR1;
  }
  if (cuts || has(kThink)) return unknown("it treats reasoning as no published one does");
  return Format::kV3;
}

absl::StatusOr<Format> FormatOfCheckpoint(const std::string& model_dir) {
  const std::filesystem::path dir(model_dir);
  const auto refuse = [&](std::string_view why) {
    return absl::FailedPreconditionError(
        Concat("no chat with this checkpoint, only completions: ", why,
               "; --chat_format names a format (", Names(), ")"));
  };
  ASSIGN_OR_RETURN(const std::optional<Template> found, ReadTemplate(dir));
  if (found.has_value()) {
    const absl::StatusOr<Format> format = FormatOfTemplate(found->text);
    if (!format.ok()) {
      return refuse(Concat(found->file, ": ", std::string(format.status().message())));
    }
    return format;
  }
  ASSIGN_OR_RETURN(const Json config, input_file::ReadJsonObject((dir / "config.json").string()));
  const Json type = config.value("model_type", Json());
  if (type == "deepseek_v32") return Format::kV32;
  if (type == "deepseek_v4") return Format::kV4;
  return refuse(Concat(dir.string(), " has no chat_template"));
}

absl::Status CheckVocabulary(Format format, const tokenizer::Tokenizer& tokenizer) {
  std::vector<std::string_view> needed = {kBos, kEos};
  if (format != Format::kV2) needed.insert(needed.end(), {kUser, kAssistant});
  if (format == Format::kV32 || format == Format::kV4) needed.push_back(kDsml);
  for (const std::string_view marker : needed) {
    if (tokenizer.TokenId(marker) < 0) {
      return absl::FailedPreconditionError(Concat("chat format ", FormatName(format),
                                                  " needs the token ", marker,
                                                  ", which the tokenizer does not have"));
    }
  }
  return absl::OkStatus();
}

}  // namespace chat

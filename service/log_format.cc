#include "service/log_format.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "service/process.h"
#include "spdlog/details/log_msg.h"
#include "spdlog/formatter.h"

namespace service {
namespace {

bool IsKeyChar(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; }

std::string JsonString(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&result, "\\u%04x", c);
    } else {
      result += c;
    }
  }
  return result + "\"";
}

class LineFormatter final : public spdlog::formatter {
 public:
  explicit LineFormatter(bool json) : json_(json) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::string time = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ",
                                              absl::FromChrono(message.time), absl::UTCTimeZone());
    const auto level_view = spdlog::level::to_string_view(message.level);
    const std::string level(level_view.data(), level_view.size());
    const std::string process(message.logger_name.data(), message.logger_name.size());
    const std::string text(message.payload.data(), message.payload.size());
    std::string line;
    if (json_) {
      const LogFields fields = ParseLogMessage(text);
      line = absl::StrCat("{\"time\":\"", time, "\",\"level\":\"", level,
                          "\",\"process\":", JsonString(process),
                          ",\"message\":", JsonString(fields.words));
      for (const auto& [key, value] : fields.pairs) {
        absl::StrAppend(&line, ",", JsonString(key), ":", JsonString(value));
      }
      line += "}\n";
    } else {
      line = absl::StrCat("time=", time, " level=", level, " process=", process, " ", text, "\n");
    }
    out.append(line.data(), line.data() + line.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>(json_);
  }

 private:
  const bool json_;
};

}  // namespace

std::string LogValue(std::string_view value) {
  bool plain = !value.empty();
  for (const char c : value) {
    plain = plain && static_cast<unsigned char>(c) > 0x20 && c != '"' && c != '\\' && c != 0x7f;
  }
  if (plain) return std::string(value);
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += c == '\n' ? "\\n" : "?";
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

LogFields ParseLogMessage(std::string_view message) {
  LogFields fields;
  size_t at = 0;
  while (at < message.size()) {
    if (message[at] == ' ') {
      ++at;
      continue;
    }
    size_t key_end = at;
    while (key_end < message.size() && IsKeyChar(message[key_end])) ++key_end;
    if (key_end == at || key_end == message.size() || message[key_end] != '=') {
      const size_t end = std::min(message.find(' ', at), message.size());
      if (!fields.words.empty()) fields.words += ' ';
      fields.words += message.substr(at, end - at);
      at = end;
      continue;
    }
    std::string key(message.substr(at, key_end - at));
    std::string value;
    at = key_end + 1;
    if (at < message.size() && message[at] == '"') {
      for (++at; at < message.size() && message[at] != '"'; ++at) {
        if (message[at] == '\\' && at + 1 < message.size()) {
          ++at;
          value += message[at] == 'n' ? '\n' : message[at];
        } else {
          value += message[at];
        }
      }
      ++at;
    } else {
      const size_t end = std::min(message.find(' ', at), message.size());
      value = std::string(message.substr(at, end - at));
      at = end;
    }
    fields.pairs.emplace_back(std::move(key), std::move(value));
  }
  return fields;
}

std::unique_ptr<spdlog::formatter> MakeLogFormatter(bool json) {
  return std::make_unique<LineFormatter>(json);
}

}  // namespace service

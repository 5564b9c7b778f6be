// How a log line looks: `time=... level=... process=... message`, or the same as one JSON object
// whose members are the key=value pairs of the message ("message" holds its other words).

#ifndef SERVICE_LOG_FORMAT_H_
#define SERVICE_LOG_FORMAT_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace spdlog {
class formatter;
}

namespace service {

std::unique_ptr<spdlog::formatter> MakeLogFormatter(bool json);

// `words key=value key="quoted value"` taken apart: the words, joined by spaces, then the pairs.
struct LogFields {
  std::string words;
  std::vector<std::pair<std::string, std::string>> pairs;
};
LogFields ParseLogMessage(std::string_view message);

}  // namespace service

#endif  // SERVICE_LOG_FORMAT_H_

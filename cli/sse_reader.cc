#include "cli/sse_reader.h"

namespace cli {

bool SseReader::Add(std::string_view bytes, const std::function<void(std::string_view)>& on_event) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    line_.append(bytes.substr(0, end));
    if (line_.size() + data_.size() > kMaxEventBytes) return false;
    if (end == std::string_view::npos) return true;
    bytes.remove_prefix(end + 1);
    std::string_view line = line_;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    TakeLine(line, on_event);
    line_.clear();
  }
  return true;
}

void SseReader::TakeLine(std::string_view line,
                         const std::function<void(std::string_view)>& on_event) {
  constexpr std::string_view kData = "data:";
  if (line.empty()) {
    if (has_data_) on_event(data_);
    data_.clear();
    has_data_ = false;
  } else if (line.substr(0, kData.size()) == kData) {
    line.remove_prefix(kData.size());
    if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
    if (has_data_) data_ += '\n';
    data_ += line;
    has_data_ = true;
  }
}

}  // namespace cli

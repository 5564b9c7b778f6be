// SseReader: cuts a body of server-sent events, which arrives in pieces, into events.
//
// Thread-compatible.

#ifndef CLI_SSE_READER_H_
#define CLI_SSE_READER_H_

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace cli {

class SseReader final {
 public:
  static constexpr size_t kMaxEventBytes = 16 << 20;

  // Calls `on_event` with the data of every event that `bytes` completes: its `data:` lines, joined
  // by newlines.  Comments, other fields and events without data are passed over.  False: an event
  // has more than kMaxEventBytes; the rest cannot be read.
  bool Add(std::string_view bytes, const std::function<void(std::string_view)>& on_event);

 private:
  void TakeLine(std::string_view line, const std::function<void(std::string_view)>& on_event);

  std::string line_;  // begun, without its end
  std::string data_;  // of the event begun
  bool has_data_ = false;
};

}  // namespace cli

#endif  // CLI_SSE_READER_H_

// Text from its parts, std::string_view among them (Debian's absl::StrCat does not take those).

#ifndef CHAT_TEXT_H_
#define CHAT_TEXT_H_

#include <string>
#include <string_view>
#include <type_traits>

namespace chat {

// Parts are strings, views and integers.
template <typename... Parts>
void Append(std::string* text, const Parts&... parts) {
  const auto add = [text](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      text->append(std::to_string(part));
    } else {
      text->append(std::string_view(part));
    }
  };
  (add(parts), ...);
}

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::string text;
  Append(&text, parts...);
  return text;
}

}  // namespace chat

#endif  // CHAT_TEXT_H_

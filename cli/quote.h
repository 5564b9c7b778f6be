// Quote: bytes as one readable word for the terminal.

#ifndef CLI_QUOTE_H_
#define CLI_QUOTE_H_

#include <string>
#include <string_view>

namespace cli {

// In double quotes; quotes, backslashes, control characters and bytes that are not UTF-8 are
// escaped.
std::string Quote(std::string_view bytes);

}  // namespace cli

#endif  // CLI_QUOTE_H_

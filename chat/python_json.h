// JSON as Python's json.dumps(value, ensure_ascii=False) writes it: what the published chat formats
// put into prompts.  Keys keep their order.

#ifndef CHAT_PYTHON_JSON_H_
#define CHAT_PYTHON_JSON_H_

#include <string>

#include "nlohmann/json.hpp"

namespace chat {

// Whether arrays and objects stand in one another more than `levels` deep.
bool DeeperThan(int levels, const nlohmann::ordered_json& value);
inline constexpr int kMaxLevels = 128;

// REQUIRES: not DeeperThan(kMaxLevels, value): it recurs.  Strings are UTF-8, as in
// every value that was parsed.
std::string PythonJson(const nlohmann::ordered_json& value);

}  // namespace chat

#endif  // CHAT_PYTHON_JSON_H_

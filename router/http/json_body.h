// JSON that strangers send: bounded in depth and size of objects while it is read, and every wrong
// member named with its value.
//
// JsonBody is a function without state, Members is thread-compatible.

#ifndef ROUTER_HTTP_JSON_BODY_H_
#define ROUTER_HTTP_JSON_BODY_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace router::http {

using Json = nlohmann::ordered_json;

// Errors: kInvalidArgument: not JSON (where), not an object, nested too deeply, an object with too
// many members (finding one takes as long as there are others).
absl::StatusOr<Json> ParseJsonObject(std::string_view body);

// As text; what is no UTF-8 becomes U+FFFD.
std::string Dump(const Json& value);
bool IsTokenId(const Json& value);
// A value in an error: enough to find it, not a whole prompt.
std::string Shown(const Json& value);
// The same of a member's name that a stranger has chosen.
std::string ShownName(const std::string& name);
// "NAME is VALUE: must be RULE"
absl::Status BadMember(std::string_view name, const Json& value, std::string_view rule);

// The members of an object, each asked for once.  Absent and null are the same.  The first error is
// kept, later answers are then without meaning.
class Members final {
 public:
  // `object` must outlive this.
  explicit Members(const Json& object) : object_(object) {}

  const Json* Find(const char* name);
  std::optional<bool> Bool(const char* name);
  std::optional<std::string> String(const char* name);
  // A number that a float can hold.
  std::optional<float> Number(const char* name);
  std::optional<int64_t> Integer(const char* name, int64_t min, int64_t max);
  // The one value that is what happens without it.
  void Expect(const char* name, const Json& only);
  void Fail(const absl::Status& error);

  // The first error; or that of a member that nobody has asked for.
  absl::Status Finish() const;

 private:
  const Json& object_;
  std::set<std::string> known_;
  absl::Status status_;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_JSON_BODY_H_

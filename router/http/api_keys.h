// ApiKeys: who may use the API, by bearer tokens of a file: one a line, with the name of its tenant
// behind it if its requests are somebody's; a line that begins with "#" is a comment.  Only hashes
// of keys are kept, and nothing of one is ever logged.
//
// Thread-safe: const after Load.

#ifndef ROUTER_HTTP_API_KEYS_H_
#define ROUTER_HTTP_API_KEYS_H_

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace router::http {

class ApiKeys final {
 public:
  // An empty path: no keys, everybody may.
  // Errors: kNotFound / kInvalidArgument naming the file and the line, never the key.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  bool empty() const { return keys_.empty(); }
  // The tenant of the key in `authorization`, the header's value; "": nobody's.  Takes the same
  // time for every wrong key.  Errors: kUnauthenticated.
  absl::StatusOr<std::string> TenantOf(std::string_view authorization) const;

 private:
  using Hash = std::array<unsigned char, 32>;
  static Hash HashOf(std::string_view key);

  struct Key {
    Hash hash;
    std::string tenant;
  };
  std::vector<Key> keys_;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_API_KEYS_H_

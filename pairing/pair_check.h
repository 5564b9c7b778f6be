// Whether a prefill worker can send its cache blocks to a decode worker, and in words why not:
// their bytes must mean the same, and they need a data link that both have.
//
// The decode worker asks this in a Handshake, before the first byte moves; the router asks it of
// the GetInfo of both, before it sends a request to the two.  Pure functions.

#ifndef PAIRING_PAIR_CHECK_H_
#define PAIRING_PAIR_CHECK_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ferry::v1 {
class HandshakeRequest;
class LayoutRecord;
class WorkerInfo;
}  // namespace ferry::v1

namespace pairing {

struct Field {
  std::string name;
  std::string value;
  friend bool operator==(const Field&, const Field&) = default;
};

struct Link {
  std::string kind;     // "shm", "tcp", "rc"
  std::string host_id;  // equal: the same host
};

// What one worker says of itself.
struct Profile {
  std::string name;           // in errors: "prefill worker 10.0.0.5:8601"
  std::vector<Field> layout;  // must be equal on both sides
  std::vector<Link> links;    // best first
};

// Every field of the record that has to be equal, the most telling first; `schema` before all,
// because fields of another schema may mean something else.
std::vector<Field> LayoutFields(const ferry::v1::LayoutRecord& record);

Profile ProfileOf(const ferry::v1::WorkerInfo& info, std::string name);
Profile ProfileOf(const ferry::v1::HandshakeRequest& request, std::string name);

// Errors: kFailedPrecondition / INCOMPATIBLE: names the first field that differs, or the links,
// with the values of both.  Nothing mends it while both processes live.
absl::Status CheckPair(const Profile& prefill, const Profile& decode);

}  // namespace pairing

#endif  // PAIRING_PAIR_CHECK_H_

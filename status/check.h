// FERRY_CHECK: dies with a message when an invariant of our own is broken.  Never used on bytes that
// come from outside (files, peers, users): those get an absl::Status.

#ifndef STATUS_CHECK_H_
#define STATUS_CHECK_H_

#include <sstream>

namespace status {

// Collects the message of a failed check and aborts the process in its destructor.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct CheckVoidify {
  void operator&(std::ostream&) const {}
};

}  // namespace status

// FERRY_CHECK(a == b) << "a=" << a;
#define FERRY_CHECK(condition)                \
  (condition) ? (void)0                       \
              : ::status::CheckVoidify() &    \
                    ::status::CheckFailure(__FILE__, __LINE__, #condition).stream()

#endif  // STATUS_CHECK_H_

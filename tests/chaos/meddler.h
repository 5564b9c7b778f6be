// Meddler: stands before a decode worker as its gRPC server and passes every call on, but repeats
// calls of other workers and the router, and lets them overtake each other.
//
// Thread-safe.

#ifndef TESTS_CHAOS_MEDDLER_H_
#define TESTS_CHAOS_MEDDLER_H_

#include <cstdint>
#include <memory>
#include <string>

namespace chaos {

class Meddler {
 public:
  // Listens on a port of `ip`; `target` is the worker's "host:port".
  static std::unique_ptr<Meddler> Start(const std::string& ip, const std::string& target);
  virtual ~Meddler() = default;

  virtual const std::string& address() const = 0;
  // How many calls it has sent a second time.
  virtual int64_t num_repeated() const = 0;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_MEDDLER_H_

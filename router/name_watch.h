// NameWatch: looks DNS names up again and again, on one thread of its own, because the system's
// resolver blocks.
//
// Thread-safe.

#ifndef ROUTER_NAME_WATCH_H_
#define ROUTER_NAME_WATCH_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/worker_name.h"

namespace router {

class NameWatch final {
 public:
  using Found = absl::StatusOr<std::vector<std::string>>;
  // `on_found(i, what LookUp says of names[i])` is called on the thread: for every name at once,
  // and then every `period`; it must not block.
  NameWatch(std::vector<WorkerName> names, absl::Duration period,
            std::function<void(size_t, Found)> on_found,
            std::function<Found(const WorkerName&)> look_up = LookUp);
  // `on_found` is not called any more.  Does not wait for a look-up that is under way.
  ~NameWatch();

 private:
  struct Shared;
  static void Main(const std::shared_ptr<Shared>& shared);

  // Shared with the thread, which may be inside a look-up for a while yet.
  const std::shared_ptr<Shared> shared_;
};

}  // namespace router

#endif  // ROUTER_NAME_WATCH_H_

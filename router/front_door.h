// FrontDoor: the way of a request into the router, the same for every front (gRPC, HTTP): checked,
// tokenised (long texts on a small pool) and submitted on the loop, or refused, which is logged and
// counted.  For a client that has gone nothing more is done.
//
// Thread-safe.

#ifndef ROUTER_FRONT_DOOR_H_
#define ROUTER_FRONT_DOOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/router.h"
#include "router/work_pool.h"
#include "tracing/trace_context.h"

namespace router {

class FrontDoor final {
 public:
  explicit FrontDoor(Router* router);  // must outlive the door

  struct Arrival {
    int64_t number = 0;        // Router::NextNumber: its name for OnClientGone and OnClientDrained
    absl::Time time = {};      // EventLoop::Now()
    absl::Time deadline = {};  // the same clock
    TextRules text = {};
    tracing::TraceContext trace = {};
  };
  // A request, and the client that hears of it on the loop's thread, of its end in every case.
  struct Entry {
    Arrival arrival;
    std::shared_ptr<const ferry::v1::GenerateRequest> request;
    std::shared_ptr<ClientStream> client;
  };
  // The requests of one call: none of them runs before all have been found good.  If one is not, or
  // the queue has no room for the call, a client hears why, and then the others that they are
  // cancelled.  REQUIRES: not empty.
  void Enter(std::vector<Entry> entries);
  // Whether the router takes requests now, and everything about this one but its prompt.
  absl::Status Check(const ferry::v1::GenerateRequest& request) const;
  // The end of a request that does not get so far.  `request_id` may be empty.
  void Refuse(const Arrival& arrival, const std::string& request_id, const absl::Status& status,
              std::shared_ptr<ClientStream> client);
  // Logs and counts a refusal that the caller tells the client of.
  void NoteRefusal(const Arrival& arrival, const std::string& request_id,
                   const absl::Status& status);

  // Runs work on `num_bytes` of input: here, or on the pool if they are many.
  // Errors: kResourceExhausted if too much waits for the pool.
  absl::Status Run(size_t num_bytes, std::function<void()> work);

  Router* router() const { return router_; }

 private:
  absl::StatusOr<PreparedRequest> Prepare(const Entry& entry) const;
  void PrepareAll(const std::vector<Entry>& entries);
  // False: it is over at once, and its client has been told or will be.  On the loop's thread.
  bool Submit(const Entry& entry, PreparedRequest prepared);
  // Because of another request of its call: neither logged nor counted.
  void Cancel(const Entry& entry);
  // Of the call, because of the entry at `index`.
  void RefuseAll(const std::vector<Entry>& entries, size_t index, const absl::Status& status);

  Router* const router_;
  WorkPool pool_;
};

}  // namespace router

#endif  // ROUTER_FRONT_DOOR_H_

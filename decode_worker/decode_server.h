// DecodeServer: a whole decode worker around a started runtime: scheduler, receiver, services,
// server. What main adds is flags, signals and the metrics endpoint.
//
// Thread-compatible.

#ifndef DECODE_WORKER_DECODE_SERVER_H_
#define DECODE_WORKER_DECODE_SERVER_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "decode_worker/options.h"

namespace prometheus {
class Registry;
}
namespace worker {
struct WorkerRuntime;
}

namespace decode_worker {

class DecodeScheduler;

class DecodeServer final {
 public:
  // Errors: kUnavailable naming the address if it cannot be listened on.
  static absl::StatusOr<std::unique_ptr<DecodeServer>> Start(
      const DecodeOptions& options, std::unique_ptr<worker::WorkerRuntime> runtime,
      std::shared_ptr<prometheus::Registry> registry);
  ~DecodeServer();
  DecodeServer(const DecodeServer&) = delete;
  DecodeServer& operator=(const DecodeServer&) = delete;

  int32_t port() const;
  const worker::WorkerRuntime& runtime() const;
  DecodeScheduler& scheduler();

  // Not ready, refuses new requests; running ones go on.
  void StartDrain();
  // No request is left, and no block that a remote write may still reach.
  bool drained() const;
  // Ends what is left and everything else, in the order that main.cc describes.
  void Stop();

 private:
  DecodeServer();

  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_DECODE_SERVER_H_

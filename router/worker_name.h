// WorkerName: an entry of --workers: one worker's address, or a DNS name with as many workers
// behind it as it has records.
//
//   10.0.0.5:8601, worker-3:8601     a worker; gRPC looks a name up when it connects
//   dns:///prefill.example:8601      every A and AAAA record is a worker, at that port
//   dns:///_grpc._tcp.prefill        every SRV record is a worker, at the record's name and port
//
// Thread-safe.

#ifndef ROUTER_WORKER_NAME_H_
#define ROUTER_WORKER_NAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace router {

struct WorkerName {
  enum class Kind { kAddress, kHosts, kServices };
  std::string text;  // as --workers has it; of kAddress: the address
  Kind kind = Kind::kAddress;
  std::string host = {};  // what is looked up; of kAddress: empty
  int32_t port = 0;       // of kHosts
};

// Errors: kInvalidArgument naming the text.
absl::StatusOr<WorkerName> ParseWorkerName(const std::string& text);

// "host:port" of every record, sorted, none twice.  Blocks for as long as the system's resolver
// does.
// Errors: kNotFound: the name, or a record of it, does not exist.  kUnavailable: no server gave an
// answer.  Both name the name.
// REQUIRES: not kAddress.
absl::StatusOr<std::vector<std::string>> LookUp(const WorkerName& name);

}  // namespace router

#endif  // ROUTER_WORKER_NAME_H_

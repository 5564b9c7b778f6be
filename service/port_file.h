// The file by which a supervisor or a test learns ports that were chosen at random.

#ifndef SERVICE_PORT_FILE_H_
#define SERVICE_PORT_FILE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace service {

// Writes "NAME=PORT" lines to `path` at once (write + rename).  An empty path: nothing.
// Errors: kUnavailable naming the path and the system's cause.
absl::Status WritePorts(const std::string& path,
                        const std::vector<std::pair<std::string, int32_t>>& ports);
// The two that every worker has.
absl::Status WritePortFile(const std::string& path, int32_t grpc_port, int32_t metrics_port);

// Whether they will be able to.  Errors: as theirs.
absl::Status CheckPortFile(const std::string& path);

}  // namespace service

#endif  // SERVICE_PORT_FILE_H_

// The flags of commands that talk to a router, and words for what goes wrong on the way there.

#ifndef CLI_ROUTER_FLAGS_H_
#define CLI_ROUTER_FLAGS_H_

#include <string>

#include "absl/status/status.h"
#include "client/ferry_client.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace cli {

// --address: host:port, checked before anything is called.  `options` must outlive the parsing.
CLI::Option* AddAddressFlag(CLI::App& command, const std::string& help,
                            ferry::ClientOptions* options);

// --tls_ca, --tls_cert, --tls_key.  `options` must outlive the parsing of `command`.
void AddTlsFlags(CLI::App& command, ferry::ClientOptions* options);

// `status` of a call, with what to look at when no connection came about: gRPC says "Socket closed"
// to a client without TLS, and "empty address list" of TLS files that do not belong together.
absl::Status ExplainConnection(const absl::Status& status, const ferry::ClientOptions& options);

}  // namespace cli

#endif  // CLI_ROUTER_FLAGS_H_

#include "cli/router_flags.h"

#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/listen_address.h"

namespace cli {

CLI::Option* AddAddressFlag(CLI::App& command, const std::string& help,
                            ferry::ClientOptions* options) {
  return command.add_option("--address", options->address, help)
      ->check(CLI::Validator(
          [](std::string& address) {
            const auto parsed = service::ParseListenAddress(address);
            return parsed.ok() && parsed->port > 0
                       ? std::string()
                       : absl::StrCat("\"", address,
                                      "\" is not host:port with a port of 1 to 65535");
          },
          "HOST:PORT"));
}

void AddTlsFlags(CLI::App& command, ferry::ClientOptions* options) {
  command.add_option("--tls_ca", options->tls_ca_file,
                     "PEM authority of the router's certificate; turns TLS on");
  command.add_option("--tls_cert", options->tls_cert_file, "PEM certificate of this client");
  command.add_option("--tls_key", options->tls_key_file, "PEM key of this client");
}

absl::Status ExplainConnection(const absl::Status& status, const ferry::ClientOptions& options) {
  const std::string message(status.message());
  const bool silent = absl::EndsWith(message, "the router does not answer");
  const bool unconnected = absl::StartsWith(message, "failed to connect");
  const bool no_channel = absl::StartsWith(message, "empty address list");
  if (!silent && !unconnected && !no_channel) return status;
  const auto explained = [&](const std::string& hint) {
    return absl::Status(status.code(),
                        absl::StrCat(message, silent ? " at " + options.address : "", hint));
  };
  if (absl::StrContains(message, "Connection refused")) return status;  // nobody listens
  if (options.tls_ca_file.empty() && options.tls_cert_file.empty()) {
    return explained("; if it expects TLS, give --tls_ca");
  }
  if (no_channel) {
    return absl::InvalidArgumentError(
        "the TLS files cannot be used: is --tls_ca a certificate, and --tls_key the key of "
        "--tls_cert?");
  }
  return explained(
      "; is its certificate signed by --tls_ca and made for this host name or address, and does it "
      "ask for a certificate of the client (--tls_cert, --tls_key)?");
}

}  // namespace cli

#include "service/process.h"

#include "absl/strings/str_cat.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"
#include "service/listen_address.h"
#include "status/status_macros.h"

namespace service {
namespace {

class ExposerServer final : public MetricsServer {
 public:
  ExposerServer(const std::string& address, std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)), exposer_(address, /*num_threads=*/1) {
    exposer_.RegisterCollectable(registry_);
  }
  int32_t port() const override { return exposer_.GetListeningPorts().front(); }

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Exposer exposer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, std::shared_ptr<prometheus::Registry> registry) {
  // The exposer says only that it failed.
  RETURN_IF_ERROR(CheckCanListen(address));
  try {
    return std::make_unique<ExposerServer>(address, std::move(registry));
  } catch (const std::exception& error) {  // CivetException: lost the port since the check
    const std::string message = error.what();
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", message));
  }
}

}  // namespace service

#include "router/options.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "router/worker_name.h"
#include "service/listen_address.h"

namespace router {

absl::Status RouterOptions::Validate() const {
  std::vector<std::string> problems;
  const auto require = [&problems](bool good, auto&&... words) {
    if (!good) problems.push_back(absl::StrCat(words...));
  };
  for (const auto& [flag, address] :
       {std::pair{"--listen", listen}, std::pair{"--metrics_listen", metrics_listen}}) {
    const auto parsed = service::ParseListenAddress(address);
    require(parsed.ok(), flag, ": ", std::string(parsed.status().message()));
  }
  if (!http_listen.empty()) {
    const auto parsed = service::ParseListenAddress(http_listen);
    require(parsed.ok(), "--http_listen: ", std::string(parsed.status().message()));
    for (const auto& [flag, other] :
         {std::pair{"--listen", listen}, std::pair{"--metrics_listen", metrics_listen}}) {
      require(!parsed.ok() || parsed->port == 0 || http_listen != other, flag,
              " and --http_listen are both ", other);
    }
  }
  require(api_keys_file.empty() || !http_listen.empty(),
          "--api_keys_file needs --http_listen: keys are HTTP's");
  require(!model_assets.empty(), "--model_assets is missing");
  require(!workers.empty(), "--workers is missing");
  std::set<std::string> seen;
  for (const std::string& worker : workers) {
    const auto parsed = ParseWorkerName(worker);
    require(parsed.ok(), "--workers: ", std::string(parsed.status().message()));
    require(seen.insert(worker).second, "--workers: ", worker, " is named twice");
  }
  require(policy == "cost" || policy == "least_load" || policy == "round_robin", "--policy: \"",
          policy, "\" is not cost, least_load or round_robin");
  require(max_queue > 0, "--max_queue: ", max_queue, " is not positive");
  require(max_queue_bytes > 0, "--max_queue_bytes: ", max_queue_bytes, " is not positive");
  require(max_attempts > 0, "--max_attempts: ", max_attempts, " is not positive");
  require(max_migrations >= 0, "--max_migrations: ", max_migrations, " is negative");
  require(local_prefill_tokens >= 0, "--local_prefill_tokens: ", local_prefill_tokens,
          " is negative");
  require(otlp_endpoint.empty() || absl::StartsWith(otlp_endpoint, "http://") ||
              absl::StartsWith(otlp_endpoint, "https://"),
          "--otlp_endpoint: \"", otlp_endpoint, "\" is no http:// or https:// URL");
  require(trace_ratio >= 0 && trace_ratio <= 1, "--trace_ratio: ", trace_ratio,
          " is not between 0 and 1");
  require(tls.cert_file.empty() == tls.key_file.empty(),
          "--tls_cert and --tls_key must be given together");
  for (const auto& [flag, duration] :
       {std::pair{"--default_deadline_s", default_deadline},
        std::pair{"--stream_idle_s", stream_idle}, std::pair{"--heartbeat_s", heartbeat},
        std::pair{"--worker_wait_s", worker_wait}, std::pair{"--drain_limit_s", drain_limit},
        std::pair{"--dns_refresh_s", dns_refresh}}) {
    require(duration > absl::ZeroDuration(), flag, ": ", absl::FormatDuration(duration),
            " is not positive");
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

}  // namespace router

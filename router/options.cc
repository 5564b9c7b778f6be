#include "router/options.h"

#include <cmath>
#include <set>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "router/worker_name.h"
#include "service/listen_address.h"

namespace router {
namespace {

bool IsHttpUrl(const std::string& text) {
  for (const std::string scheme : {"http://", "https://"}) {
    if (absl::StartsWith(text, scheme)) {
      return text.size() > scheme.size() && text[scheme.size()] != '/' &&
             text[scheme.size()] != ':';
    }
  }
  return false;
}

}  // namespace

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
  require(!trust_tenant_header || !http_listen.empty(),
          "--trust_tenant_header needs --http_listen: the header is HTTP's");
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
  require(otlp_endpoint.empty() || IsHttpUrl(otlp_endpoint), "--otlp_endpoint: \"", otlp_endpoint,
          "\" is no http:// or https:// URL");
  require(trace_ratio >= 0 && trace_ratio <= 1, "--trace_ratio: ", trace_ratio,
          " is not between 0 and 1");
  require(tls.cert_file.empty() == tls.key_file.empty(),
          "--tls_cert and --tls_key must be given together");
  require(tenant_max_running >= 0, "--tenant_max_running: ", tenant_max_running, " is negative");
  require(tenant_max_queued >= 0, "--tenant_max_queued: ", tenant_max_queued, " is negative");
  require(tenant_max_rate >= 0 && std::isfinite(tenant_max_rate),
          "--tenant_max_rate: ", tenant_max_rate, " is not a number of 0 or more");
  const auto tenants = ParseTenantLimits(tenant_limits);
  require(tenants.ok(), std::string(tenants.status().message()));
  require(kv_watermark > 0 && kv_watermark <= 1, "--kv_watermark: ", kv_watermark,
          " is not above 0 and at most 1");
  require(breaker_failures >= 0, "--breaker_failures: ", breaker_failures, " is negative");
  for (const auto& [name, duration] : durations()) {
    const bool may_be_zero = std::string_view(name) == "max_ttft";
    require(may_be_zero ? duration >= absl::ZeroDuration() : duration > absl::ZeroDuration(), "--",
            name, "_s: ", absl::FormatDuration(duration),
            may_be_zero ? " is negative" : " is not positive");
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

std::vector<std::pair<const char*, absl::Duration>> RouterOptions::durations() const {
  return {{"default_deadline", default_deadline},
          {"stream_idle", stream_idle},
          {"heartbeat", heartbeat},
          {"accept_limit", accept_limit},
          {"cancel_ack", cancel_ack},
          {"worker_wait", worker_wait},
          {"drain_limit", drain_limit},
          {"breaker_open", breaker_open},
          {"priority_ageing", priority_ageing},
          {"dns_refresh", dns_refresh},
          {"max_ttft", max_ttft}};
}

absl::StatusOr<std::map<std::string, TenantLimits>> ParseTenantLimits(
    const std::vector<std::string>& items) {
  std::map<std::string, TenantLimits> limits;
  for (const std::string& item : items) {
    const std::pair<std::string, std::string> named = absl::StrSplit(item, absl::MaxSplits('=', 1));
    const std::vector<std::string> numbers = absl::StrSplit(named.second, ':');
    TenantLimits one;
    if (named.first.empty() || numbers.size() < 2 || numbers.size() > 3 ||
        !absl::SimpleAtoi(numbers[0], &one.max_running) ||
        !absl::SimpleAtoi(numbers[1], &one.max_queued) ||
        (numbers.size() == 3 && !absl::SimpleAtod(numbers[2], &one.max_rate)) ||
        one.max_running < 0 || one.max_queued < 0 ||
        !(one.max_rate >= 0 && std::isfinite(one.max_rate))) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tenant_limit: \"", item,
                       "\" is not NAME=RUNNING:QUEUED[:RATE] with numbers of 0 or more"));
    }
    if (!limits.emplace(named.first, one).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tenant_limit: ", named.first, " is named twice"));
    }
  }
  return limits;
}

}  // namespace router

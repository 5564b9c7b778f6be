// Flags of ferry-router.  Parsed in main only.

#ifndef ROUTER_OPTIONS_H_
#define ROUTER_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/admission.h"
#include "service/grpc_server.h"
#include "service/process.h"

namespace router {

struct RouterOptions {
  std::string listen = "0.0.0.0:8500";       // --listen host:port
  std::string http_listen;                   // --http_listen; empty: no HTTP
  std::string api_keys_file;                 // --api_keys_file, of HTTP
  bool trust_tenant_header = false;          // --trust_tenant_header, of HTTP
  std::vector<std::string> chat_formats;     // --chat_format [NAME=]FORMAT, repeatable
  std::string metrics_listen = "0.0.0.0:0";  // --metrics_listen
  std::string port_file;                     // --port_file
  std::vector<std::string> model_assets;  // --model_assets [NAME=]DIR, repeatable: tokenizer.json,
                                          // config.json, generation_config.json
  std::vector<std::string> workers;       // --workers (WorkerName; roles are learned by GetInfo)
  std::string policy = "cost";            // --policy cost|least_load|round_robin
  uint64_t hash_seed = 0;                 // --hash_seed
  int32_t max_queue = 4096;               // --max_queue requests waiting for a worker
  int64_t max_queue_bytes = int64_t{1} << 30;  // --max_queue_bytes
  int64_t tenant_max_running = 0;  // --tenant_max_running of each tenant not named below; 0: any
  int64_t tenant_max_queued = 0;   // --tenant_max_queued
  double tenant_max_rate = 0;      // --tenant_max_rate, requests a second
  std::vector<std::string> tenant_limits;  // --tenant_limit NAME=RUNNING:QUEUED[:RATE], repeatable
  double kv_watermark = 0.95;              // --kv_watermark: share of a decode worker's cache
  int32_t breaker_failures = 3;            // --breaker_failures in a row; 0: no breakers
  int32_t max_attempts = 10;   // --max_attempts that may end with their worker, the first included
  int32_t max_migrations = 1;  // --max_migrations of an output that has begun; 0: none
  int32_t local_prefill_tokens =
      256;  // --local_prefill_tokens: uncached tokens D may prefill itself
  absl::Duration default_deadline = absl::Seconds(600);  // --default_deadline_s
  absl::Duration stream_idle = absl::Seconds(30);        // --stream_idle_s
  absl::Duration heartbeat = absl::Seconds(1);           // --heartbeat_s; 5 missed: dead
  absl::Duration accept_limit = absl::Seconds(10);       // --accept_limit_s to accept a request
  absl::Duration cancel_ack = absl::Seconds(1);          // --cancel_ack_s to confirm a cancel
  absl::Duration worker_wait = absl::Seconds(30);     // --worker_wait_s for a worker that is away
  absl::Duration drain_limit = absl::Seconds(120);    // --drain_limit_s
  absl::Duration breaker_open = absl::Seconds(5);     // --breaker_open_s
  absl::Duration priority_ageing = absl::Seconds(5);  // --priority_ageing_s
  absl::Duration max_ttft;                            // --max_ttft_s; 0: any
  absl::Duration dns_refresh = absl::Seconds(5);      // --dns_refresh_s: names in --workers
  std::string otlp_endpoint;  // --otlp_endpoint that spans go to; empty: nowhere
  double trace_ratio = 1;     // --trace_ratio of requests without a trace that are sampled
  service::TlsOptions tls;
  service::LogOptions log;

  // The times above by name; every one is exported as a gauge ferry_config_seconds{name=...}.
  std::vector<std::pair<const char*, absl::Duration>> durations() const;

  // Every problem at once, in one status.
  absl::Status Validate() const;
};

// NAME=RUNNING:QUEUED, ...; a number of 0 is no limit.
// Errors: kInvalidArgument naming the item.
absl::StatusOr<std::map<std::string, TenantLimits>> ParseTenantLimits(
    const std::vector<std::string>& items);

}  // namespace router

#endif  // ROUTER_OPTIONS_H_

// Flags that both workers have.  Parsed in main files only; nothing below main reads a flag.

#ifndef WORKER_WORKER_OPTIONS_H_
#define WORKER_WORKER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/engine.h"
#include "service/grpc_server.h"
#include "service/process.h"

namespace worker {

struct WorkerOptions {
  std::string listen = "0.0.0.0:0";  // --listen host:port
  std::string advertise;  // --advertise host:port peers use; empty: listen with the real port, and
                          // the IP that peers see where it names all interfaces
  std::string metrics_listen = "0.0.0.0:0";  // --metrics_listen
  std::string port_file;                     // --port_file
  std::string model_name;                    // --model_name; empty: the checkpoint directory's name
  engine::EngineOptions engine;  // --model, --device, --dtype, --kv_cache_dtype, --num_threads,
                                 // --block_size, --max_model_len, --max_batch_tokens, --max_seqs
  int64_t cache_bytes = int64_t{1} << 30;  // --cache_bytes, or
  int32_t num_blocks = 0;                  // --num_blocks; > 0 wins
  // Of models that keep a state per sequence; 0: worker/cache_size.h decides.
  int32_t num_state_slots = 0;      // --num_state_slots
  int32_t snapshot_blocks = 0;      // --snapshot_blocks from one snapshot of a prompt to the next
  uint64_t hash_seed = 0;           // --hash_seed
  std::string links = "shm,tcp";    // --links, best first
  std::string cache_path = "auto";  // --cache_path auto, device or staged: of a GPU's cache
  std::string data_ip = "0.0.0.0";  // --data_ip of the data link's listener
  int32_t data_port = 0;            // --data_port; 0: any
  int32_t max_waiting = 1024;       // --max_waiting requests queued
  service::TlsOptions tls;          // --tls_cert, --tls_key, --tls_ca
  service::LogOptions log;          // --log_level, --log_json

  // Timeouts of serving.md 2; every one is exported as a gauge ferry_config_seconds{name=...}.
  absl::Duration handshake_timeout = absl::Seconds(5);
  absl::Duration reserve_wait = absl::Seconds(2);
  absl::Duration chunk_stall = absl::Seconds(5);
  absl::Duration transfer_total = absl::Seconds(60);
  absl::Duration kv_lease = absl::Seconds(30);
  absl::Duration quarantine_max = absl::Seconds(60);
  absl::Duration drain_limit = absl::Seconds(120);

  std::vector<std::string> link_kinds() const;  // of `links`
  // The timeouts above by name.
  std::vector<std::pair<const char*, absl::Duration>> timeouts() const;

  // Every problem at once, in one status.
  absl::Status Validate() const;
};

}  // namespace worker

#endif  // WORKER_WORKER_OPTIONS_H_

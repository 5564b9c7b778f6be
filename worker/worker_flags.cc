#include "worker/worker_flags.h"

#include "CLI/CLI.hpp"
#include "service/command_line.h"
#include "service/process.h"

namespace worker {

void AddWorkerFlags(CLI::App& app, WorkerOptions* options) {
  app.set_version_flag("--version", std::string(service::kVersion));
  const auto add = [&app](const char* flag, auto& field, const char* help) {
    return app.add_option(flag, field, help)->capture_default_str();
  };
  add("--listen", options->listen, "host:port of the gRPC server; port 0: any");
  add("--advertise", options->advertise,
      "host:port by which other workers call this one; empty: --listen with the real port, and on "
      "all "
      "interfaces the IP that its calls come from");
  add("--metrics_listen", options->metrics_listen, "host:port of http://.../metrics; port 0: any");
  add("--port_file", options->port_file, "file that receives grpc_port=N and metrics_port=N");

  add("--model", options->engine.model_dir, "checkpoint directory; required");
  app.add_flag("--random_weights", options->engine.random_weights,
               "random weights of the config.json's shapes, for measuring; nothing else is read");
  add("--model_name", options->model_name, "name to serve it under; empty: the directory's name");
  add("--device", options->engine.device, "cpu or cuda");
  add("--dtype", options->engine.dtype, "activations: auto, float32 or bfloat16");
  add("--kv_cache_dtype", options->engine.kv_cache_dtype,
      "cache: auto, float32, bfloat16 or fp8; auto: as --dtype");
  add("--num_threads", options->engine.num_threads, "CPU threads; 0: all cores of this process");
  add("--block_size", options->engine.block_size,
      "tokens a cache block, a multiple of 64; 0: the model's");
  add("--max_model_len", options->engine.max_model_len, "tokens; 0: the checkpoint's");
  add("--max_batch_tokens", options->engine.limits.max_tokens, "new tokens a step, at most");
  add("--max_seqs", options->engine.limits.max_seqs, "sequences a step, at most");
  add("--cache_bytes", options->cache_bytes, "memory for cache blocks and state slots");
  add("--num_blocks", options->num_blocks, "cache blocks instead of --cache_bytes; 0: unset");
  add("--num_state_slots", options->num_state_slots,
      "slots for the state of sequences and for snapshots of it, if the model keeps one; 0: "
      "--max_seqs and snapshots of the whole cache, in at most half of --cache_bytes");
  add("--snapshot_blocks", options->snapshot_blocks,
      "blocks of a prompt from one snapshot of its state to the next; 0: as many as weigh as much "
      "as a slot");
  add("--hash_seed", options->hash_seed, "seed of block hashes; the same in the whole system")
      ->check(service::Unsigned64());
  add("--max_waiting", options->max_waiting, "requests that may wait in the queue");

  add("--links", options->links, "data links, best first: shm, tcp, rc");
  add("--cache_path", options->cache_path,
      "how a GPU's cache gets to the links: device (links within a host read the GPU's memory), "
      "staged "
      "(through pinned memory of the host), or auto: device where the UCX at hand can");
  add("--data_ip", options->data_ip,
      "address of the data link's listener, and the only interface of its TCP; 0.0.0.0: all, and "
      "a peer is told the address on its way");
  add("--data_port", options->data_port,
      "port of the data link's listener; of two (tcp and rc) the second one has the next; 0: any");

  add("--tls_cert", options->tls.cert_file, "PEM certificate");
  add("--tls_key", options->tls.key_file, "PEM key");
  add("--tls_ca", options->tls.ca_file, "PEM authority; a server then demands client certificates");
  add("--log_level", options->log.level, "trace, debug, info, warn or error");
  app.add_flag("--log_json", options->log.json, "one JSON object a log line");

  service::AddSecondsFlag(app, "--handshake_timeout_s", &options->handshake_timeout,
                          "first contact of two workers");
  service::AddSecondsFlag(app, "--reserve_wait_s", &options->reserve_wait,
                          "how long a prefill worker waits for room at the decode worker");
  service::AddSecondsFlag(app, "--chunk_stall_s", &options->chunk_stall,
                          "a transfer without progress for so long has failed");
  service::AddSecondsFlag(app, "--transfer_total_s", &options->transfer_total,
                          "a whole transfer, at most");
  service::AddSecondsFlag(app, "--kv_lease_s", &options->kv_lease,
                          "held blocks live for so long unrenewed");
  service::AddSecondsFlag(app, "--quarantine_max_s", &options->quarantine_max,
                          "wait for a writer to stop before its link is destroyed");
  service::AddSecondsFlag(app, "--drain_limit_s", &options->drain_limit,
                          "wait for running work at the end");
}

}  // namespace worker

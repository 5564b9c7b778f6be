#include "worker/worker_options.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "service/listen_address.h"

namespace worker {
namespace {

// Far beyond what serves anybody: a mistyped number is refused in words before memory runs out.
constexpr int32_t kMostBlockTokens = 1 << 16;
constexpr int32_t kMostStepTokens = 1 << 20;
constexpr int32_t kMostStepSeqs = 1 << 16;

bool IsOneOf(const std::string& value, std::initializer_list<const char*> allowed) {
  for (const char* candidate : allowed) {
    if (value == candidate) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> WorkerOptions::link_kinds() const {
  return absl::StrSplit(links, ',', absl::SkipWhitespace());
}

absl::Status WorkerOptions::Validate() const {
  std::vector<std::string> problems;
  const auto require = [&problems](bool good, auto&&... words) {
    if (!good) absl::StrAppend(&problems.emplace_back(), words...);
  };
  for (const auto& [flag, address] :
       {std::pair{"--listen", listen}, std::pair{"--metrics_listen", metrics_listen}}) {
    const auto parsed = service::ParseListenAddress(address);
    require(parsed.ok(), flag, ": ", std::string(parsed.status().message()));
  }
  if (!advertise.empty()) {
    const auto parsed = service::ParseListenAddress(advertise);
    require(parsed.ok() && parsed->port > 0, "--advertise: \"", advertise,
            "\" is not host:port with a port of 1 to 65535");
  }
  require(!engine.model_dir.empty(), "--model is missing");
  require(IsOneOf(engine.device, {"cpu", "cuda"}), "--device: \"", engine.device,
          "\" is not cpu or cuda");
  require(IsOneOf(engine.dtype, {"auto", "float32", "bfloat16"}), "--dtype: \"", engine.dtype,
          "\" is not auto, float32 or bfloat16");
  require(IsOneOf(engine.kv_cache_dtype, {"auto", "float32", "bfloat16", "fp8"}),
          "--kv_cache_dtype: \"", engine.kv_cache_dtype,
          "\" is not auto, float32, bfloat16 or fp8");
  require(engine.num_threads >= 0 && engine.num_threads <= engine::kMaxThreads,
          "--num_threads: ", engine.num_threads, " is not 0 to ", engine::kMaxThreads);
  require(engine.block_size >= 0 && engine.block_size % 64 == 0,
          "--block_size: ", engine.block_size, " is not a multiple of 64, or 0");
  require(engine.block_size <= kMostBlockTokens, "--block_size: ", engine.block_size,
          " is more than ", kMostBlockTokens);
  require(engine.max_model_len >= 0, "--max_model_len: ", engine.max_model_len, " is negative");
  require(engine.limits.max_tokens > 0 && engine.limits.max_tokens <= kMostStepTokens,
          "--max_batch_tokens: ", engine.limits.max_tokens, " is not 1 to ", kMostStepTokens);
  require(engine.limits.max_seqs > 0 && engine.limits.max_seqs <= kMostStepSeqs,
          "--max_seqs: ", engine.limits.max_seqs, " is not 1 to ", kMostStepSeqs);
  require(num_blocks >= 0, "--num_blocks: ", num_blocks, " is negative");
  require(num_state_slots >= 0, "--num_state_slots: ", num_state_slots, " is negative");
  require(snapshot_blocks >= 0, "--snapshot_blocks: ", snapshot_blocks, " is negative");
  require(num_blocks > 0 || cache_bytes > 0, "--cache_bytes: ", cache_bytes, " is not positive");
  const std::vector<std::string> kinds = link_kinds();
  require(!kinds.empty(), "--links is empty");
  for (const std::string& kind : kinds) {
    require(IsOneOf(kind, {"shm", "tcp", "rc"}), "--links: \"", kind, "\" is not shm, tcp or rc");
  }
  require(IsOneOf(cache_path, {"auto", "device", "staged"}), "--cache_path: \"", cache_path,
          "\" is not auto, device or staged");
  require(cache_path != "device" || engine.device == "cuda",
          "--cache_path device needs --device cuda");
  require(data_port >= 0 && data_port <= 65535, "--data_port: ", data_port, " is not 0 to 65535");
  require(max_waiting > 0, "--max_waiting: ", max_waiting, " is not positive");
  require(tls.cert_file.empty() == tls.key_file.empty(),
          "--tls_cert and --tls_key must be given together");
  for (const auto& [name, duration] : timeouts()) {
    require(duration > absl::ZeroDuration(), "--", name, "_s: ", absl::FormatDuration(duration),
            " is not positive");
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

std::vector<std::pair<const char*, absl::Duration>> WorkerOptions::timeouts() const {
  return {{"handshake_timeout", handshake_timeout},
          {"reserve_wait", reserve_wait},
          {"chunk_stall", chunk_stall},
          {"transfer_total", transfer_total},
          {"kv_lease", kv_lease},
          {"quarantine_max", quarantine_max},
          {"drain_limit", drain_limit}};
}

}  // namespace worker

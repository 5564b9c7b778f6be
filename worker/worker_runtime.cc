#include "worker/worker_runtime.h"

#include <filesystem>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kv_transfer/ucx_transport.h"
#include "service/startup.h"
#include "status/status_macros.h"
#include "tokenizer/tokenizer.h"
#include "worker/speed_benchmark.h"

namespace worker {
namespace {

std::string DirectoryName(const std::string& model_dir) {
  std::filesystem::path path = std::filesystem::path(model_dir).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "dir/"
  return path.filename().string();
}

// Blocks to map, block 0 included.
absl::StatusOr<int32_t> NumBlocks(const WorkerOptions& options, int64_t block_bytes) {
  const int64_t usable =
      options.num_blocks > 0 ? options.num_blocks : options.cache_bytes / block_bytes - 1;
  if (usable < 1 || usable >= std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("cache of ", options.cache_bytes,
                                                   " bytes holds ", usable, " blocks of ",
                                                   block_bytes, " bytes"));
  }
  return static_cast<int32_t>(usable + 1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options) {
  RETURN_IF_ERROR(options.Validate());
  // Said now, not after minutes of loading.
  RETURN_IF_ERROR(service::CheckStart({.listen = options.listen,
                                       .metrics_listen = options.metrics_listen,
                                       .port_file = options.port_file,
                                       .tls = options.tls}));
  auto runtime = std::make_unique<WorkerRuntime>();
  runtime->options = options;
  runtime->model_name =
      options.model_name.empty() ? DirectoryName(options.engine.model_dir) : options.model_name;
  runtime->epoch = kv_transfer::Epoch::Random();
  kv_transfer::UcxOptions ucx;
  ucx.epoch = runtime->epoch;
  ucx.link_kinds = options.link_kinds();
  ucx.listen_ip = options.data_ip;
  ucx.listen_port = options.data_port;
  ASSIGN_OR_RETURN(runtime->transport, kv_transfer::CreateUcxTransport(ucx));
  ASSIGN_OR_RETURN(runtime->engine, engine::Engine::Create(options.engine));
  runtime->tokenizer_hash = tokenizer::TokenizerHash(options.engine.model_dir);
  runtime->layout_fingerprint = engine::LayoutFingerprint(*runtime->engine, runtime->model_name);
  if (runtime->engine->cache_layout().spec().state_slot_bytes != 0) {
    return absl::UnimplementedError(
        absl::StrCat(runtime->model_name, " keeps a state per sequence, which workers cannot yet"));
  }

  ASSIGN_OR_RETURN(const int32_t num_blocks, NumBlocks(options, runtime->block_bytes()));
  ASSIGN_OR_RETURN(engine::CacheMemory memory,
                   engine::CacheMemory::Map(num_blocks * runtime->block_bytes()));
  runtime->token_blocks = std::make_unique<engine::CacheMemory>(std::move(memory));
  runtime->engine->SetCache(runtime->token_blocks->span(), {});
  runtime->pool = std::make_unique<engine::BlockPool>(num_blocks);
  runtime->hasher = std::make_unique<block_hash::BlockHasher>(options.hash_seed);

  RETURN_IF_ERROR(runtime->transport->Register(runtime->token_blocks->span()));

  ASSIGN_OR_RETURN(runtime->speed, MeasureSpeed(*runtime->engine, *runtime->pool));
  return runtime;
}

}  // namespace worker

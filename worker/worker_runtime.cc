#include "worker/worker_runtime.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device_copies.h"
#include "kv_transfer/shared_slots.h"
#include "kv_transfer/staged_transport.h"
#include "kv_transfer/ucx_transport.h"
#include "service/process.h"
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

// Whether links within a host are to take the device's memory as it is.
absl::StatusOr<bool> LinksTakeDeviceMemory(const WorkerOptions& options) {
  if (options.engine.device != "cuda" || options.cache_path == "staged") return false;
  // Without a device the engine says so.
  if (kernels::cuda::EnterThread().ok() && kv_transfer::UcxKnowsDeviceMemory()) return true;
  if (options.cache_path == "auto") return false;
  return absl::FailedPreconditionError(
      absl::StrCat("--cache_path device: UCX ", kv_transfer::UcxVersion(),
                   " knows no memory of CUDA devices here; PyPI's libucx-cu13 does"));
}

// Staging slots for processes of this host; null: none, and the log says why.
std::unique_ptr<kv_transfer::SharedSlots> ShareSlots(const WorkerRuntime& runtime,
                                                     int64_t slot_bytes) {
  // Where links within the host take the device's memory nothing is staged for them.
  if (runtime.cache_path != "staged") return nullptr;
  auto slots = kv_transfer::SharedSlots::Create(runtime.copies.get(), kv_transfer::kSharedSlots,
                                                slot_bytes);
  if (slots.ok()) return *std::move(slots);
  spdlog::warn("staging slots not shared cause={}",
               service::LogValue(std::string(slots.status().message())));
  return nullptr;
}

}  // namespace

absl::Status MapCache(const CacheSize& size, WorkerRuntime& runtime) {
  const WorkerOptions& asked = runtime.options;
  // The host may have less memory than the device.
  const auto map =
      asked.engine.device == "cuda" ? &engine::CacheMemory::Reserve : &engine::CacheMemory::Map;
  auto blocks = map(size.num_blocks * runtime.block_bytes());
  if (!blocks.ok()) {
    return absl::Status(blocks.status().code(),
                        absl::StrCat(asked.num_blocks > 0 ? "--num_blocks: " : "--cache_bytes: ",
                                     asked.num_blocks > 0 ? asked.num_blocks : asked.cache_bytes,
                                     ": ", std::string(blocks.status().message())));
  }
  runtime.token_blocks = std::make_unique<engine::CacheMemory>(*std::move(blocks));
  absl::Span<std::byte> slot_bytes;
  if (size.num_state_slots > 0) {
    ASSIGN_OR_RETURN(engine::CacheMemory slots,
                     map(size.num_state_slots * runtime.state_slot_bytes()));
    runtime.state_slots = std::make_unique<engine::CacheMemory>(std::move(slots));
    slot_bytes = runtime.state_slots->span();
  }
  runtime.engine->SetCache(runtime.token_blocks->span(), slot_bytes);
  runtime.pool = std::make_unique<engine::BlockPool>(size.num_blocks, size.num_state_slots);
  runtime.snapshots = {.block_size = runtime.block_size(), .every_blocks = size.snapshot_blocks};
  return absl::OkStatus();
}

absl::Status RegisterCache(WorkerRuntime& runtime) {
  ASSIGN_OR_RETURN(runtime.copies, runtime.engine->MakeCopies());
  if (runtime.copies == nullptr) {
    runtime.cache_path = "host";
  } else if (runtime.cache_path != "device") {
    runtime.cache_path = "staged";
  }
  const auto kind =
      runtime.copies == nullptr ? kv_transfer::MemoryKind::kHost : kv_transfer::MemoryKind::kDevice;
  if (runtime.copies != nullptr) {
    const int64_t slot_bytes = std::min(
        std::max(runtime.block_bytes(), runtime.state_slot_bytes()), kv_transfer::kMaxMessageBytes);
    runtime.transport =
        kv_transfer::CreateStagedTransport(std::move(runtime.transport), runtime.copies.get(),
                                           slot_bytes, ShareSlots(runtime, slot_bytes));
  }
  const engine::CacheSpans cache = runtime.engine->cache();
  RETURN_IF_ERROR(runtime.transport->Register(cache.token_blocks, kind));
  if (cache.state_slots.empty()) return absl::OkStatus();
  return runtime.transport->Register(cache.state_slots, kind);
}

absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options) {
  RETURN_IF_ERROR(options.Validate());
  return StartRuntime(options, [&options] { return engine::Engine::Create(options.engine); });
}

absl::StatusOr<std::unique_ptr<WorkerRuntime>> StartRuntime(const WorkerOptions& options,
                                                            const EngineFactory& make_engine) {
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
  ASSIGN_OR_RETURN(ucx.device_memory, LinksTakeDeviceMemory(options));
  if (ucx.device_memory) ucx.enter_thread = [] { kernels::cuda::EnterThread().IgnoreError(); };
  ASSIGN_OR_RETURN(runtime->transport, kv_transfer::CreateUcxTransport(ucx));
  ASSIGN_OR_RETURN(runtime->engine, make_engine());
  ASSIGN_OR_RETURN(runtime->tokenizer_hash, tokenizer::TokenizerHash(options.engine.model_dir));
  runtime->layout_fingerprint = engine::LayoutFingerprint(*runtime->engine, runtime->model_name);
  ASSIGN_OR_RETURN(const CacheSize size,
                   CacheSize::For(options, runtime->block_bytes(), runtime->state_slot_bytes()));
  RETURN_IF_ERROR(MapCache(size, *runtime));
  if (ucx.device_memory) runtime->cache_path = "device";
  RETURN_IF_ERROR(RegisterCache(*runtime));
  runtime->hasher = std::make_unique<block_hash::BlockHasher>(options.hash_seed);

  ASSIGN_OR_RETURN(runtime->speed, MeasureSpeed(*runtime->engine, *runtime->pool));
  return runtime;
}

}  // namespace worker

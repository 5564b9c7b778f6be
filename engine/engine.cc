#include "engine/engine.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/block_pool.h"
#include "engine/executor.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "model/config.h"
#include "status/status_macros.h"

namespace engine {
namespace {

int32_t UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// Whether products may round activations to bf16; on the GPU that is the default.
bool RoundsActivations(const EngineOptions& options) {
  return options.dtype == "bfloat16" || (options.dtype == "auto" && options.device == "cuda");
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const EngineOptions& options) {
  if (options.device == "cpu") {
    if (options.dtype != "auto" && options.dtype != "float32") {
      return absl::InvalidArgumentError(
          absl::StrCat("dtype ", options.dtype, " is not available on cpu: use float32"));
    }
    return kernels::cpu::CreateCpuBackend(options.num_threads > 0 ? options.num_threads
                                                                  : UsableCores());
  }
  if (options.device == "cuda") {
    if (options.dtype != "float32" && !RoundsActivations(options)) {
      return absl::InvalidArgumentError(
          absl::StrCat("dtype must be auto, float32 or bfloat16, is '", options.dtype, "'"));
    }
    return kernels::cuda::CreateCudaBackend({.bfloat16 = RoundsActivations(options)});
  }
  return absl::InvalidArgumentError(
      absl::StrCat("device must be cpu or cuda, is '", options.device, "'"));
}

absl::StatusOr<model::KvCacheDtype> ParseKvCacheDtype(const EngineOptions& options) {
  const std::string& name = options.kv_cache_dtype;
  if (name == "auto") {
    return RoundsActivations(options) ? model::KvCacheDtype::kBfloat16
                                      : model::KvCacheDtype::kFloat32;
  }
  if (name == "float32") return model::KvCacheDtype::kFloat32;
  if (name == "bfloat16") return model::KvCacheDtype::kBfloat16;
  if (name == "fp8") return model::KvCacheDtype::kFp8;
  return absl::InvalidArgumentError(
      absl::StrCat("kv_cache_dtype must be auto, float32, bfloat16 or fp8, is '", name, "'"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadModelConfig(options.model_dir));
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads must be 0 to ", kMaxThreads, ", is ", options.num_threads));
  }
  if (options.max_model_len < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len must be 0 or more, is ", options.max_model_len));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Backend> backend, MakeBackend(options));

  model::NetworkOptions network_options;
  ASSIGN_OR_RETURN(network_options.kv_cache_dtype, ParseKvCacheDtype(options));
  network_options.random_weights = options.random_weights;
  network_options.block_size =
      options.block_size == 0 ? model::DefaultBlockSize(config) : options.block_size;
  network_options.max_model_len =
      options.max_model_len > 0 ? options.max_model_len : config.max_position_embeddings;
  if (network_options.max_model_len > config.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("max_model_len ", options.max_model_len,
                                                   " exceeds the checkpoint's ",
                                                   config.max_position_embeddings, " positions"));
  }
  if (options.block_size < 0 || options.block_size % 64 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size must be a positive multiple of 64, is ", options.block_size));
  }
  model::StepLimits limits = options.limits;
  limits.max_blocks_per_seq = BlocksFor(network_options.max_model_len, network_options.block_size);
  limits.sliding_window = config.sliding_window;
  limits.max_history_tokens = std::max(limits.max_history_tokens, network_options.max_model_len);
  limits.max_tokens = std::max(limits.max_tokens, limits.max_seqs);
  limits.max_absorbed_tokens =
      std::min(std::max(limits.max_absorbed_tokens, limits.max_seqs), limits.max_tokens);
  limits.max_samples = std::max(limits.max_samples, limits.max_seqs);
  network_options.limits = limits;
  ASSIGN_OR_RETURN(std::unique_ptr<model::Network> network,
                   model::LoadNetwork(options.model_dir, network_options, *backend));
  ASSIGN_OR_RETURN(
      std::unique_ptr<Engine> engine,
      Executor::Create(std::move(backend), std::move(network), limits, options.num_penalty_slots));
  return engine;
}

std::string LayoutFingerprint(const Engine& engine, const std::string& model_name) {
  return model::LayoutFingerprint(engine.cache_layout(), model_name,
                                  engine.network().weights_digest());
}

}  // namespace engine

#include "decode_worker/request_check.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "decode_worker/branch.h"
#include "ferry/v1/worker.pb.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"
#include "worker/worker_runtime.h"

namespace decode_worker {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Whether prompt, output and branches can ever fit.
absl::Status CheckSize(const ferry::v1::RequestSpec& spec, const DecodeLimits& limits) {
  const ferry::v1::ResolvedSampling& sampling = spec.sampling();
  const int64_t prompt = spec.num_prompt_tokens();
  const int64_t max_tokens = sampling.max_tokens();
  const int64_t emitted = spec.token_ids_size() - prompt;
  const int64_t n = sampling.n();
  if (emitted >= max_tokens) {
    return Invalid(emitted, " tokens are emitted already, max_tokens is ", max_tokens);
  }
  if (emitted > 0 && n > 1) {
    return Invalid("n is ", n, " and ", emitted,
                   " tokens are emitted already: only n = 1 can be continued");
  }
  if (sampling.min_tokens() > max_tokens) {
    return Invalid("min_tokens is ", sampling.min_tokens(), ", max_tokens ", max_tokens);
  }
  if (prompt + max_tokens > limits.request.max_model_len) {
    return Invalid("prompt of ", prompt, " tokens and max_tokens ", max_tokens,
                   " are more than the context of ", limits.request.max_model_len, " tokens");
  }
  // The last token is never written.  Branches can run one after another, so one must fit.
  const int32_t blocks = engine::BlocksFor(prompt + max_tokens - 1, limits.request.block_size);
  if (blocks > limits.request.usable_blocks) {
    return Invalid("prompt of ", prompt, " tokens and max_tokens ", max_tokens, " need ", blocks,
                   " cache blocks, this worker has ", limits.request.usable_blocks);
  }
  if (n > limits.max_seqs) {
    return Invalid("n is ", n, ", this worker runs ", limits.max_seqs, " sequences at a time");
  }
  if (limits.num_state_slots > 0 && n > limits.num_state_slots) {
    return Invalid("n is ", n, ", this worker has ", limits.num_state_slots, " state slots");
  }
  if (!worker::ToSamplingOptions(sampling, 0).HasPenalties()) return absl::OkStatus();
  if (n > limits.num_penalty_slots) {
    return Invalid("n is ", n, " with penalties, this worker has ", limits.num_penalty_slots,
                   " penalty slots");
  }
  // A preempted branch looks back on everything; a trunk does so once for every branch.
  const int64_t history = std::max(prompt + max_tokens, n * (prompt + emitted));
  if (history > limits.max_history_tokens) {
    return Invalid("penalties over ", history, " tokens, this worker can look back on ",
                   limits.max_history_tokens);
  }
  return absl::OkStatus();
}

}  // namespace

DecodeLimits LimitsOf(const worker::WorkerRuntime& runtime) {
  const engine::Engine& engine = *runtime.engine;
  const model::StepLimits& step = engine.limits();
  return {.request = {.model = runtime.model_name,
                      .vocab_size = engine.network().config().vocab_size,
                      .max_model_len = engine.network().max_model_len(),
                      .block_size = runtime.block_size(),
                      .usable_blocks = runtime.pool->num_blocks() - 1},
          .epoch = runtime.epoch.ToBytes(),
          .max_seqs = std::min(step.max_seqs, step.max_samples),
          .num_penalty_slots = engine.num_penalty_slots(),
          .num_state_slots = runtime.num_state_slots(),
          .max_history_tokens = step.max_history_tokens};
}

absl::StatusOr<RequestSpec> CheckRequest(const ferry::v1::DecodeRequest& request,
                                         const DecodeLimits& limits) {
  const ferry::v1::RequestSpec& wire = request.spec();
  if (request.worker_epoch() != limits.epoch) {
    return status::WithReason(
        absl::FailedPreconditionError("the request is meant for another epoch of this worker"),
        status::kStaleEpoch);
  }
  RETURN_IF_ERROR(worker::CheckRequestSpec(wire, limits.request));
  RETURN_IF_ERROR(CheckSize(wire, limits));
  RequestSpec spec;
  spec.id = {.request_id = wire.key().request_id(), .attempt = wire.key().attempt()};
  spec.tokens.assign(wire.token_ids().begin(), wire.token_ids().end());
  spec.num_prompt_tokens = static_cast<int32_t>(wire.num_prompt_tokens());
  spec.sampling = worker::ToSamplingOptions(wire.sampling(), 0);
  spec.num_branches = static_cast<int32_t>(wire.sampling().n());
  spec.cache_namespace = wire.cache_namespace();
  spec.priority = wire.priority();
  if (wire.deadline_ms() > 0) {  // 0: none but the RPC's own
    constexpr uint64_t kLongestMs = uint64_t{7} * 24 * 3600 * 1000;
    spec.deadline = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(
                                       std::min<uint64_t>(wire.deadline_ms(), kLongestMs)));
  }
  spec.local_prefill = request.local_prefill();
  if (!spec.local_prefill) {
    const absl::StatusOr<kv_transfer::Epoch> epoch =
        kv_transfer::Epoch::FromBytes(request.prefill().epoch());
    if (!epoch.ok()) {
      return Invalid("prefill.epoch: ", std::string(epoch.status().message()));
    }
    spec.prefill_epoch = *epoch;
  }
  return spec;
}

}  // namespace decode_worker

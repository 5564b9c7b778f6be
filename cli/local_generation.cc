#include "cli/local_generation.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "ferry/v1/inference.pb.h"
#include "ferry/v1/worker.pb.h"
#include "router/model_assets.h"
#include "router/request.h"
#include "router/text_stream.h"
#include "status/status_macros.h"
#include "worker/request_spec.h"

namespace cli {
namespace {

using ferry::v1::GenerateResponse;
using OnMessage = std::function<bool(const GenerateResponse&)>;

// New tokens a prefill step.
constexpr int32_t kChunkTokens = 512;

// The zero slot and the sequence's own.
constexpr int32_t kStateSlots = 2;

ferry::v1::TokenLogprob MakeLogprob(int32_t id, float logprob,
                                    const tokenizer::Tokenizer* tokenizer) {
  ferry::v1::TokenLogprob out;
  out.set_token_id(static_cast<uint32_t>(id));
  out.set_logprob(logprob);
  if (tokenizer != nullptr) out.set_token(std::string(tokenizer->TokenBytes(id)));
  return out;
}

// One branch of the request: its sequence, and what of it has been told.
class BranchRun {
 public:
  BranchRun(const router::PreparedRequest& prepared, uint32_t branch)
      : prepared_(prepared),
        branch_(branch),
        text_(prepared.model->tokenizer.get(), {.stops = prepared.stops,
                                                .include_stop = prepared.include_stop,
                                                .stop_ids = prepared.stop_ids}) {
    seq_.sampling = worker::ToSamplingOptions(prepared.spec->sampling(), branch);
    seq_.tokens = prepared.tokens;
    seq_.num_prompt_tokens = static_cast<int32_t>(prepared.tokens.size());
    if (seq_.sampling.HasPenalties()) {
      seq_.penalty_slot = 0;
      seq_.penalty_reset_needed = true;
    }
  }

  engine::Sequence& seq() { return seq_; }
  bool finished() const { return finished_; }

  // What the client sees of one sampled token.
  GenerateResponse Accept(int64_t step_id, const kernels::SampleResult& sample) {
    engine::AcceptToken(seq_, step_id, sample.token_id);
    const std::vector<int32_t>& stop_ids = seq_.sampling.stop_token_ids;
    const bool by_stop_id =
        std::find(stop_ids.begin(), stop_ids.end(), sample.token_id) != stop_ids.end();
    const bool ended = by_stop_id || seq_.num_output_tokens() >= seq_.sampling.max_tokens;
    const auto id = static_cast<uint32_t>(sample.token_id);
    const router::TextStream::Piece piece = text_.Add({&id, 1}, ended, by_stop_id);
    GenerateResponse message;
    message.set_index(branch_);
    message.set_text(piece.text);
    message.add_token_ids(id);
    if (prepared_.wants_logprobs) AddLogprobs(sample, message);
    if (piece.stopped || ended) {
      message.set_finish_reason(piece.stopped || by_stop_id ? ferry::v1::FINISH_REASON_STOP
                                                            : ferry::v1::FINISH_REASON_LENGTH);
      finished_ = true;
    }
    return message;
  }

 private:
  void AddLogprobs(const kernels::SampleResult& sample, GenerateResponse& message) const {
    const tokenizer::Tokenizer* tokenizer = prepared_.model->tokenizer.get();
    ferry::v1::PositionLogprobs* position = message.add_logprobs();
    *position->mutable_chosen() = MakeLogprob(sample.token_id, sample.logprob, tokenizer);
    for (int32_t i = 0; i < seq_.sampling.num_logprobs; ++i) {
      if (sample.top_ids[i] < 0) break;  // the vocabulary is smaller
      *position->add_top() = MakeLogprob(sample.top_ids[i], sample.top_logprobs[i], tokenizer);
    }
  }

  const router::PreparedRequest& prepared_;
  const uint32_t branch_;
  router::TextStream text_;
  engine::Sequence seq_;
  bool finished_ = false;
};

// An engine with room for one sequence.
class OneSequenceEngine {
 public:
  static absl::StatusOr<std::unique_ptr<OneSequenceEngine>> Create(engine::EngineOptions options,
                                                                   int32_t max_tokens) {
    options.limits.max_tokens = kChunkTokens;
    options.limits.max_seqs = 1;
    options.limits.max_samples = 1;
    options.num_penalty_slots = 1;
    std::unique_ptr<OneSequenceEngine> self(new OneSequenceEngine());
    ASSIGN_OR_RETURN(self->engine_, engine::Engine::Create(options));
    const model::CacheLayout& layout = self->engine_->cache_layout();
    const int32_t block_size = layout.spec().block_size;
    const int32_t num_blocks =
        1 + (max_tokens + block_size - 1) / block_size;  // block 0 is reserved
    ASSIGN_OR_RETURN(engine::CacheMemory memory,
                     engine::CacheMemory::Map(num_blocks * layout.block_bytes()));
    self->memory_ = std::make_unique<engine::CacheMemory>(std::move(memory));
    absl::Span<std::byte> slot_bytes;
    if (const int64_t bytes = layout.spec().state_slot_bytes; bytes > 0) {
      ASSIGN_OR_RETURN(engine::CacheMemory slots, engine::CacheMemory::Map(kStateSlots * bytes));
      self->slot_memory_ = std::make_unique<engine::CacheMemory>(std::move(slots));
      slot_bytes = self->slot_memory_->span();
    }
    self->engine_->SetCache(self->memory_->span(), slot_bytes);
    self->pool_ =
        std::make_unique<engine::BlockPool>(num_blocks, slot_bytes.empty() ? 0 : kStateSlots);
    self->plan_ = std::make_unique<model::StepPlan>(self->engine_->limits());
    return self;
  }

  // Runs `branch` to its end.  False: `on_message` wants no more.
  absl::StatusOr<bool> Run(BranchRun& branch, const OnMessage& on_message) {
    engine::Sequence& seq = branch.seq();
    const int32_t block_size = engine_->cache_layout().spec().block_size;
    engine::PlanBuilder builder(block_size, *plan_);
    RETURN_IF_ERROR(engine::TakePrefix(seq, {}, /*num_blocks=*/0, engine::Continuation::kComputed,
                                       block_size, *pool_));
    bool wanted = true;
    while (wanted && !branch.finished()) {
      const int32_t missing = static_cast<int32_t>(seq.tokens.size()) - seq.num_computed;
      const int32_t rows = std::min(missing, kChunkTokens);
      const bool sample = rows == missing;
      RETURN_IF_ERROR(engine::GrowBlocks(seq, seq.num_computed + rows, block_size, *pool_));
      builder.Begin(++step_id_);
      builder.Add(seq, rows, /*absorbed=*/seq.num_output_tokens() > 0, sample);
      ASSIGN_OR_RETURN(const engine::StepHandle handle, engine_->Launch(*plan_));
      ASSIGN_OR_RETURN(const engine::StepResult result, engine_->Collect(handle));
      if (!sample) continue;
      if (result.samples[0].token_id == kernels::kNoToken) {
        return engine::NoTokenError(static_cast<int32_t>(seq.tokens.size()));
      }
      wanted = on_message(branch.Accept(step_id_, result.samples[0]));
    }
    engine::ReleaseBlocks(seq, *pool_);
    return wanted;
  }

 private:
  OneSequenceEngine() = default;

  // The engine uses the memory until it is gone: it comes after it.
  std::unique_ptr<engine::CacheMemory> memory_;
  std::unique_ptr<engine::CacheMemory> slot_memory_;  // null: the model keeps no state
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::BlockPool> pool_;
  std::unique_ptr<model::StepPlan> plan_;
  int64_t step_id_ = 0;
};

}  // namespace

absl::Status GenerateLocally(const engine::EngineOptions& options,
                             const ferry::v1::GenerateRequest& request,
                             const OnMessage& on_message) {
  std::vector<std::unique_ptr<router::ModelAssets>> assets(1);
  ASSIGN_OR_RETURN(assets[0], router::ModelAssets::Load(options.model_dir));
  if (options.max_model_len > 0) {
    assets[0]->SetWorkerLimits(router::WorkerLimits::OfContext(options.max_model_len));
  }
  const router::ServedModels models(std::move(assets));
  RETURN_IF_ERROR(router::CheckRequest(request, models));
  ASSIGN_OR_RETURN(const router::PreparedRequest prepared, router::PrepareRequest(request, models));
  const ferry::v1::ResolvedSampling& sampling = prepared.spec->sampling();
  const auto prompt_tokens = static_cast<int32_t>(prepared.tokens.size());
  ASSIGN_OR_RETURN(const auto engine,
                   OneSequenceEngine::Create(
                       options, prompt_tokens + static_cast<int32_t>(sampling.max_tokens())));

  const absl::Time start = absl::Now();
  absl::Time first_token = absl::InfinitePast();
  absl::Duration decode_time = absl::ZeroDuration();  // without the branches' prompts
  uint32_t num_tokens = 0;
  for (uint32_t i = 0; i < sampling.n(); ++i) {
    BranchRun branch(prepared, i);
    absl::Time last_token;
    uint32_t branch_tokens = 0;
    ASSIGN_OR_RETURN(const bool wanted, engine->Run(branch, [&](const GenerateResponse& message) {
      const absl::Time now = absl::Now();
      if (branch_tokens++ > 0) decode_time += now - last_token;
      if (num_tokens++ == 0) first_token = now;
      last_token = now;
      return on_message(message);
    }));
    if (!wanted) return absl::CancelledError("the caller cancelled the generation");
  }
  GenerateResponse last;
  ferry::v1::GenerateSummary& summary = *last.mutable_summary();
  summary.set_request_id(prepared.request_id);
  summary.set_prompt_tokens(prompt_tokens);
  summary.set_completion_tokens(num_tokens);
  summary.set_prefill_worker("this process");
  summary.set_decode_worker("this process");
  summary.set_ttft_ms(absl::ToDoubleMilliseconds(first_token - start));
  summary.set_total_ms(absl::ToDoubleMilliseconds(absl::Now() - start));
  summary.set_attempts(1);
  summary.set_seed(sampling.seed());
  summary.set_further_tokens(num_tokens - sampling.n());
  summary.set_decode_ms(absl::ToDoubleMilliseconds(decode_time));
  on_message(last);
  return absl::OkStatus();
}

}  // namespace cli

#include "worker/speed_benchmark.h"

#include <algorithm>
#include <vector>

#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "model/step_plan.h"
#include "status/status_macros.h"

namespace worker {
namespace {

constexpr double kChunkBudgetSeconds = 0.15;  // for each of the two measured chunks
constexpr int32_t kWarmUpTokens = 8;
constexpr int32_t kMaxChunkTokens = 256;
constexpr int32_t kMaxDecodeSeqs = 4;
constexpr int32_t kDecodeSteps = 3;

class Benchmark {
 public:
  Benchmark(engine::Engine& engine, engine::BlockPool& pool)
      : engine_(engine),
        pool_(pool),
        block_size_(engine.cache_layout().spec().block_size),
        plan_(engine.limits()),
        builder_(block_size_, plan_) {}
  ~Benchmark() {
    for (engine::Sequence& seq : seqs_) engine::ReleaseBlocks(seq, pool_);
  }

  absl::StatusOr<SpeedEstimate> Run() {
    SpeedEstimate speed;
    const int64_t room = std::min<int64_t>(engine_.network().max_model_len(),
                                           int64_t{pool_.num_available()} * block_size_);
    // Two chunks and the decode steps, alone and in a batch, must fit.
    const int32_t largest = std::min<int64_t>(
        {kMaxChunkTokens, engine_.limits().max_tokens, (room - 2 * kDecodeSteps) / 2});
    if (largest < 1) return speed;  // a cache too small to measure is too small to serve from

    const int32_t warm_tokens = std::min(kWarmUpTokens, largest);
    RETURN_IF_ERROR(Chunk(NewSequence(warm_tokens), warm_tokens).status());
    ReleaseAll();  // one block must do
    ASSIGN_OR_RETURN(const double warm_s, Chunk(NewSequence(warm_tokens), warm_tokens));
    const double affordable = kChunkBudgetSeconds / std::max(warm_s, 1e-9) * warm_tokens;
    const int32_t tokens =
        affordable < largest ? std::max(static_cast<int32_t>(affordable), warm_tokens) : largest;

    // Both chunks have the same linear part; the second attends to twice .. three times as much:
    // t = u / R + A u (n + c) / 2.
    ReleaseAll();
    const size_t seq = NewSequence(2 * tokens);
    ASSIGN_OR_RETURN(const double first_s, Chunk(seq, tokens));
    ASSIGN_OR_RETURN(const double second_s, Chunk(seq, tokens));
    const double tokens2 = double{1} * tokens * tokens;
    speed.prefill_s_per_token2 = std::clamp((second_s - first_s) / tokens2, 0.0, first_s / tokens2);
    speed.prefill_tokens_per_s =
        tokens / std::max(first_s - speed.prefill_s_per_token2 * tokens2 / 2, 1e-9);

    ASSIGN_OR_RETURN(const double one_s, Decode({seq}));
    speed.decode_step_ms = one_s * 1e3;
    const engine::StateSlots* const slots = pool_.state_slots();
    const int32_t batch =
        std::min({kMaxDecodeSeqs, engine_.limits().max_seqs, engine_.limits().max_samples,
                  engine_.limits().max_tokens, pool_.num_available() + 1,
                  slots == nullptr ? kMaxDecodeSeqs : slots->num_available() + 1});
    if (batch > 1) {
      std::vector<size_t> seqs = {seq};
      while (static_cast<int32_t>(seqs.size()) < batch) seqs.push_back(NewSequence(1));
      ASSIGN_OR_RETURN(const double many_s, Decode(seqs));
      speed.decode_step_ms_per_seq = std::max(0.0, many_s - one_s) / (batch - 1) * 1e3;
    }
    return speed;
  }

 private:
  size_t NewSequence(int32_t num_tokens) {
    engine::Sequence& seq = seqs_.emplace_back();
    for (int32_t i = 0; i < num_tokens; ++i) seq.tokens.push_back(NextToken());
    seq.num_prompt_tokens = num_tokens;
    seq.sampling.temperature = 0;
    return seqs_.size() - 1;
  }

  int32_t NextToken() {
    token_ = (token_ + 7919) % engine_.network().config().vocab_size;
    return token_;
  }

  void ReleaseAll() {
    for (engine::Sequence& seq : seqs_) engine::ReleaseBlocks(seq, pool_);
    seqs_.clear();
  }

  // Gives a new sequence its state slot, if the model keeps a state.
  absl::Status StartSequence(engine::Sequence& seq) {
    if (seq.num_computed > 0) return absl::OkStatus();
    return engine::TakePrefix(seq, {}, /*num_blocks=*/0, engine::Continuation::kComputed,
                              block_size_, pool_);
  }

  absl::StatusOr<double> Step() {
    ASSIGN_OR_RETURN(const engine::StepHandle handle, engine_.Launch(plan_));
    ASSIGN_OR_RETURN(const engine::StepResult result, engine_.Collect(handle));
    return result.step_ms / 1e3;
  }

  // Seconds of one chunk of the sequence's next tokens.
  absl::StatusOr<double> Chunk(size_t index, int32_t num_tokens) {
    engine::Sequence& seq = seqs_[index];
    RETURN_IF_ERROR(StartSequence(seq));
    RETURN_IF_ERROR(engine::GrowBlocks(seq, seq.num_computed + num_tokens, block_size_, pool_));
    builder_.Begin(++step_id_);
    builder_.Add(seq, num_tokens, /*absorbed=*/false, /*sample=*/false);
    return Step();
  }

  // Seconds of the fastest of a few steps that decode one token of each sequence.
  absl::StatusOr<double> Decode(const std::vector<size_t>& indices) {
    double best_s = 1e9;
    for (int32_t step = 0; step < kDecodeSteps; ++step) {
      builder_.Begin(++step_id_);
      for (const size_t index : indices) {
        engine::Sequence& seq = seqs_[index];
        RETURN_IF_ERROR(StartSequence(seq));
        // Each step has one token that is not computed yet, as after sampling.
        if (seq.num_computed == static_cast<int32_t>(seq.tokens.size()))
          seq.tokens.push_back(NextToken());
        RETURN_IF_ERROR(engine::GrowBlocks(seq, seq.num_computed + 1, block_size_, pool_));
        builder_.Add(seq, 1, /*absorbed=*/true, /*sample=*/true);
      }
      ASSIGN_OR_RETURN(const double step_s, Step());
      best_s = std::min(best_s, step_s);
      for (const size_t index : indices) seqs_[index].pending_sample = -1;
    }
    return best_s;
  }

  engine::Engine& engine_;
  engine::BlockPool& pool_;
  const int32_t block_size_;
  model::StepPlan plan_;
  engine::PlanBuilder builder_;
  std::vector<engine::Sequence> seqs_;
  int64_t step_id_ = 0;
  int32_t token_ = 0;
};

}  // namespace

absl::StatusOr<SpeedEstimate> MeasureSpeed(engine::Engine& engine, engine::BlockPool& pool) {
  return Benchmark(engine, pool).Run();
}

}  // namespace worker

#include "prefill_worker/pacing.h"

#include <algorithm>

namespace prefill_worker {
namespace {

constexpr double kMaxStepSeconds = 1;
constexpr double kNewestWeight = 0.2;
// Of the decode worker's patience: steps vary, and shorter prompts may take half of each.
constexpr double kTotalShare = 1.0 / 4;

}  // namespace

Pacing::Pacing(int32_t chunk_tokens, int32_t block_size, double tokens_per_s,
               absl::Duration transfer_total)
    : chunk_tokens_(chunk_tokens),
      block_size_(block_size),
      transfer_total_s_(absl::ToDoubleSeconds(transfer_total)),
      tokens_per_s_(tokens_per_s) {}

void Pacing::Observe(int32_t tokens, double seconds) {
  // Small steps are dominated by what a step costs in itself.
  if (tokens < std::min(block_size_, chunk_tokens_) || seconds <= 0) return;
  const double newest = tokens / seconds;
  tokens_per_s_ =
      tokens_per_s_ == 0 ? newest : (1 - kNewestWeight) * tokens_per_s_ + kNewestWeight * newest;
}

int32_t Pacing::StepTokens() const {
  if (tokens_per_s_ == 0) return chunk_tokens_;
  const double affordable = std::max<double>(tokens_per_s_ * kMaxStepSeconds, block_size_);
  return affordable < chunk_tokens_ ? static_cast<int32_t>(affordable) : chunk_tokens_;
}

bool Pacing::MayReserve(int32_t remaining_tokens) const {
  if (tokens_per_s_ == 0 || remaining_tokens == 0) return true;
  return remaining_tokens / tokens_per_s_ <= transfer_total_s_ * kTotalShare;
}

}  // namespace prefill_worker

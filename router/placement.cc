#include "router/placement.h"

namespace router {

size_t ReusableBlocks(const RequestView& request, int32_t block_size) {
  return static_cast<size_t>((request.prompt_tokens - 1) / block_size);
}

Placement MakePlacement(const RequestView& request, const Choice& choice,
                        absl::Span<const WorkerView> workers, bool held, const ChainOf& chain,
                        LoadLedger* ledger, PrefixIndex* index, absl::Time now) {
  const WorkerView& decode = workers[choice.decode];
  const WorkerView& computes = choice.prefill >= 0 ? workers[choice.prefill] : decode;
  Placement placement = {.prefill = choice.prefill >= 0 ? computes.slot : -1,
                         .decode = decode.slot,
                         .reason = choice.reason,
                         .predicted_ttft_ms = choice.predicted_ttft_ms,
                         .cached_tokens = computes.cached_tokens};
  LoadLedger::Load cache_load = {.kv_blocks = BlocksFor(request.prompt_tokens, decode.block_size),
                                 .growth_blocks = GrowthBlocks(request, decode.block_size)};
  const int64_t to_compute = request.prompt_tokens - computes.cached_tokens;
  // Whoever computes the prompt will have its blocks when the next request's turn comes.  Not so a
  // decode worker that waits for them: until they arrive it would have to compute all of the next
  // prompt.
  if (placement.local()) {
    cache_load.prefill_tokens = to_compute;
  } else if (!held) {
    placement.prefill_charge =
        ledger->Charge(placement.prefill, {.prefill_tokens = to_compute, .requests = 1}, now);
  }
  if (placement.local() || !held) {
    index->Predict(computes.slot, chain(computes.block_size),
                   ReusableBlocks(request, computes.block_size), now);
  }
  placement.decode_charge = ledger->Charge(placement.decode, {.requests = request.branches}, now);
  placement.decode_cache_charge = ledger->Charge(placement.decode, cache_load, now);
  return placement;
}

}  // namespace router

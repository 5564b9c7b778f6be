// Placement: a decision put into effect.  Its workers are charged and, where the prompt will be
// computed, its blocks are predicted, so that the next decision sees both.
//
// Owned by the loop's thread.

#ifndef ROUTER_PLACEMENT_H_
#define ROUTER_PLACEMENT_H_

#include <cstdint>
#include <functional>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"
#include "router/load_ledger.h"
#include "router/prefix_index.h"
#include "router/routing_policy.h"

namespace router {

// Where a request goes, and what was charged for it.
struct Placement {
  WorkerSlot prefill = -1;  // -1: the decode worker computes the prompt
  WorkerSlot decode = -1;
  RouteReason reason = RouteReason::kRemote;
  double predicted_ttft_ms = 0;
  int32_t cached_tokens = 0;  // that the index expects where the prompt is computed
  // The decode worker's reports show the request when it has accepted it, its cache only later.
  LoadLedger::ChargeId prefill_charge = 0;
  LoadLedger::ChargeId decode_charge = 0;
  LoadLedger::ChargeId decode_cache_charge = 0;

  bool local() const { return prefill < 0; }
};

// Leading blocks of a prompt that can be reused: the last token is always computed, and its block
// with it.
size_t ReusableBlocks(const RequestView& request, int32_t block_size);

// The prompt's full blocks of a size.
using ChainOf = std::function<absl::Span<const block_hash::BlockHash>(int32_t block_size)>;

// `held`: the prefill worker has computed the prompt before.
Placement MakePlacement(const RequestView& request, const Choice& choice,
                        absl::Span<const WorkerView> workers, bool held, const ChainOf& chain,
                        LoadLedger* ledger, PrefixIndex* index, absl::Time now);

}  // namespace router

#endif  // ROUTER_PLACEMENT_H_

#include "decode_worker/branch.h"

#include <algorithm>
#include <utility>

#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "status/check.h"

namespace decode_worker {

FinishReason FinishOf(const engine::Sequence& seq) {
  const std::vector<int32_t>& stops = seq.sampling.stop_token_ids;
  if (seq.num_output_tokens() > 0 &&
      std::find(stops.begin(), stops.end(), seq.tokens.back()) != stops.end()) {
    return FinishReason::kStop;
  }
  // The context's end is not asked for: max_tokens that do not fit it are refused at the door.
  if (seq.num_output_tokens() >= seq.sampling.max_tokens) return FinishReason::kLength;
  return FinishReason::kNone;
}

std::vector<Branch*> ForkBranches(Branch& trunk, int32_t block_size, engine::BlockPool& pool) {
  std::vector<Branch*> forks = std::exchange(trunk.forks, {});
  if (forks.empty()) return forks;
  const engine::Sequence& from = trunk.seq;
  const int32_t num_tokens = static_cast<int32_t>(from.tokens.size());
  FERRY_CHECK(static_cast<int32_t>(from.blocks.size()) == engine::BlocksFor(num_tokens, block_size))
      << "tokens=" << num_tokens << " blocks=" << from.blocks.size();
  if (num_tokens % block_size != 0) {
    trunk.tail_sharers = std::make_shared<int32_t>(static_cast<int32_t>(forks.size()) + 1);
  }
  for (Branch* fork : forks) {
    engine::Sequence& to = fork->seq;
    to.tokens = from.tokens;
    to.num_prompt_tokens = from.num_prompt_tokens;
    to.num_computed = num_tokens;
    to.blocks = from.blocks;
    pool.Share(to.blocks);
    to.hashes = from.hashes;
    to.root = from.root;
    to.num_indexed = num_tokens / block_size;  // the trunk indexes what both hold
    fork->tail_sharers = trunk.tail_sharers;
    engine::ForkState(from, to, pool);
  }
  return forks;
}

void LeaveTail(Branch& branch) {
  if (branch.tail_sharers == nullptr) return;
  --*branch.tail_sharers;
  branch.tail_sharers.reset();
}

void DropBlocks(Branch& branch, engine::BlockPool& pool) {
  FERRY_CHECK(branch.in_flight == 0) << "in_flight=" << branch.in_flight;
  LeaveTail(branch);
  engine::ReleaseBlocks(branch.seq, pool);
  for (Branch* fork : branch.forks) engine::ReleaseBlocks(fork->seq, pool);
  branch.prefill_ms = 0;
  branch.seq.num_computed = 0;
  branch.seq.num_indexed = 0;
  branch.seq.pending_sample = -1;
}

}  // namespace decode_worker

#include "router/routing_policy.h"

#include <algorithm>
#include <limits>

#include "router/length_limits.h"

namespace router {
namespace {

// Weights of serving.md 7.2.
constexpr double kTtftWeight = 1.0;
constexpr double kDecodeWeight = 0.3;
// What is computed here makes those wait who come later, whoever they are: so a prompt goes where
// it is cached also when that is a little later for itself (bench/routing_policies: more hits, and
// the mean, the 90th and the 99th percentile of the time to the first token fall with it).
constexpr double kCapacityWeight = 1.0;
constexpr double kBarrierMs = 5.0;
// Used until a worker says what it measured.
constexpr double kDefaultPrefillTokensPerSecond = 10000;
constexpr double kDefaultStepMs = 20;
// A link's start-up and bandwidth.  Only the last chunk is not hidden behind the computation.
constexpr double kTransferStartMs = 1.0;
constexpr double kTransferBytesPerMs = 2e6;
constexpr int64_t kLastChunkTokens = 512;
// Output that a request is expected to have when it may have more.
constexpr int32_t kExpectedOutputTokens = 256;
// Requests at a decode worker beyond those that it runs at a time, as a share of these and in any
// case: their prompts are computed, or on their way, when a seat becomes free.
constexpr int32_t kSpareShare = 4;
constexpr int32_t kSpareSeats = 1;
// A prefill worker with more queued work than this gets no more: the request waits in the router,
// where the decision will be made with fresh numbers.
constexpr double kMaxPrefillQueueMs = 2000;
// Candidates this close to the best one are equal.
constexpr double kTieRatio = 1.05;
constexpr double kTieMs = 2.0;

struct Option {
  Choice choice = {};
  double score = 0;
  int32_t cached_tokens = 0;
  double recent = 0;
};

double StepMs(const WorkerView& worker) {
  if (worker.observed_step_ms > 0) return worker.observed_step_ms;
  return worker.decode_step_ms > 0 ? worker.decode_step_ms : kDefaultStepMs;
}

// What computing the prompt at `worker` costs the others.
double CapacityMs(const WorkerView& worker, const RequestView& request) {
  return kCapacityWeight * PrefillMs(worker, request);
}

bool HasSeats(const WorkerView& worker, const RequestView& request) {
  return worker.max_seqs == 0 || worker.requests + request.branches <=
                                     worker.max_seqs + worker.max_seqs / kSpareShare + kSpareSeats;
}

bool HasRoom(const PolicyOptions& options, const WorkerView& worker, const RequestView& request) {
  // An empty worker takes whatever fits at all, so that no request waits for ever.
  if (worker.requests == 0 && worker.used_blocks == 0) return true;
  const int32_t needed = BlocksFor(request.prompt_tokens, worker.block_size) +
                         GrowthBlocks(request, worker.block_size);
  return HasSeats(worker, request) &&
         worker.used_blocks + needed <= options.kv_watermark * worker.num_blocks &&
         (worker.num_state_slots == 0 ||
          worker.used_state_slots + request.branches <= worker.num_state_slots);
}

bool CanPrefillMore(const WorkerView& worker) {
  return worker.waiting_tokens == 0 || PrefillQueueMs(worker) <= kMaxPrefillQueueMs;
}

double TransferMs(const WorkerView& decode, const RequestView& request) {
  const int64_t tokens =
      std::min<int64_t>(request.prompt_tokens - decode.cached_tokens, kLastChunkTokens);
  const double bytes_per_token =
      static_cast<double>(decode.block_bytes) / std::max(decode.block_size, 1);
  return kTransferStartMs + tokens * bytes_per_token / kTransferBytesPerMs;
}

// What the request costs on its decode worker: slower steps for the others, and room.
double DecodeCostMs(const WorkerView& decode, const RequestView& request) {
  const double output = std::min(request.max_tokens, kExpectedOutputTokens);
  const double slowdown = decode.requests * decode.decode_step_ms_per_seq * output;
  const double needed = BlocksFor(request.prompt_tokens, decode.block_size) +
                        GrowthBlocks(request, decode.block_size);
  const double left = 1.0 - (decode.used_blocks + needed) / std::max(decode.num_blocks, 1);
  return kDecodeWeight * slowdown + kBarrierMs / std::max(left, 0.01);
}

// Among the options that are as good as the best: those with the most of the prompt in their cache
// (a hit costs nobody anything), and of two random ones of these the one that was chosen less
// lately.
const Option& BreakTies(absl::Span<const Option* const> options, PolicyState* state) {
  double best = std::numeric_limits<double>::infinity();
  for (const Option* option : options) best = std::min(best, option->score);
  int32_t most_cached = 0;
  std::vector<const Option*> equal;
  for (const Option* option : options) {
    if (option->score > best * kTieRatio && option->score > best + kTieMs) continue;
    if (option->cached_tokens > most_cached) equal.clear();
    if (option->cached_tokens < most_cached) continue;
    most_cached = option->cached_tokens;
    equal.push_back(option);
  }
  const size_t first = state->random() % equal.size();
  if (equal.size() == 1) return *equal[first];
  size_t second = state->random() % (equal.size() - 1);
  if (second >= first) ++second;
  return equal[second]->recent < equal[first]->recent ? *equal[second] : *equal[first];
}

const Option& BreakTies(const std::vector<Option>& options, PolicyState* state) {
  std::vector<const Option*> all;
  for (const Option& option : options) all.push_back(&option);
  return BreakTies(all, state);
}

// Of the prefill workers that may send to a decode worker the best.  What one costs is the same
// whoever decodes: it is computed once.
class PrefillPicker {
 public:
  PrefillPicker(Policy policy, const RequestView& request, absl::Span<const WorkerView> workers,
                const PairBlocked& blocked, PolicyState* state)
      : policy_(policy), blocked_(blocked), state_(state) {
    for (int32_t p = 0; p < static_cast<int32_t>(workers.size()); ++p) {
      const WorkerView& worker = workers[p];
      if (!worker.is_prefill || !HoldsLength(worker, request)) continue;
      candidates_.push_back({.option = {.choice = {.prefill = p},
                                        .score = Score(worker, request),
                                        .cached_tokens = worker.cached_tokens,
                                        .recent = worker.recent_assignments},
                             .has_room = CanPrefillMore(worker)});
    }
  }

  struct Result {
    Feasibility feasibility = Feasibility::kNever;
    Option option;
  };
  Result PickFor(int32_t decode) {
    Result result;
    open_.clear();
    for (const Candidate& candidate : candidates_) {
      if (blocked_(candidate.option.choice.prefill, decode)) continue;
      if (result.feasibility == Feasibility::kNever) result.feasibility = Feasibility::kLater;
      if (!candidate.has_room) continue;
      result.feasibility = Feasibility::kNow;
      open_.push_back(&candidate.option);
    }
    if (open_.empty()) return result;
    result.option = policy_ == Policy::kRoundRobin ? *open_[state_->turn % open_.size()]
                                                   : BreakTies(open_, state_);
    result.option.choice.decode = decode;
    return result;
  }

 private:
  struct Candidate {
    Option option;
    bool has_room = false;
  };
  double Score(const WorkerView& worker, const RequestView& request) const {
    if (policy_ != Policy::kCost) return PrefillQueueMs(worker);
    return PrefillQueueMs(worker) + CapacityMs(worker, request) + PrefillMs(worker, request);
  }

  const Policy policy_;
  const PairBlocked& blocked_;
  PolicyState* const state_;
  std::vector<Candidate> candidates_;
  std::vector<const Option*> open_;  // scratch of PickFor
};

void Improve(Feasibility found, Feasibility* result) {
  if (found < *result) *result = found;
}

}  // namespace

const char* RouteReasonName(RouteReason reason) {
  switch (reason) {
    case RouteReason::kRemote:
      return "remote";
    case RouteReason::kShort:
      return "short";
    case RouteReason::kNoPrefillWorker:
      return "no_prefill_worker";
    case RouteReason::kCheaper:
      return "cheaper";
  }
  return "unknown";
}

int32_t BlocksFor(int64_t tokens, int32_t block_size) {
  return block_size > 0 ? static_cast<int32_t>((tokens + block_size - 1) / block_size) : 0;
}

int64_t ExpectedTokens(const RequestView& request) {
  return request.prompt_tokens +
         int64_t{std::min(request.max_tokens, kExpectedOutputTokens)} * request.branches;
}

int32_t GrowthBlocks(const RequestView& request, int32_t block_size) {
  return BlocksFor(std::min(request.max_tokens, kExpectedOutputTokens), block_size) *
         request.branches;
}

double PrefillQueueMs(const WorkerView& worker) {
  const double rate = worker.prefill_tokens_per_s > 0 ? worker.prefill_tokens_per_s
                                                      : kDefaultPrefillTokensPerSecond;
  return 1e3 * worker.prefill_slowdown * worker.waiting_tokens / rate;
}

double PrefillMs(const WorkerView& worker, const RequestView& request) {
  const double rate = worker.prefill_tokens_per_s > 0 ? worker.prefill_tokens_per_s
                                                      : kDefaultPrefillTokensPerSecond;
  const double n = request.prompt_tokens;
  const double computed = n - worker.cached_tokens;
  return 1e3 * worker.prefill_slowdown *
         (computed / rate +
          worker.prefill_s_per_token2 * computed * (n + worker.cached_tokens) / 2);
}

// The output is the decode worker's matter.
bool HoldsLength(const WorkerView& worker, const RequestView& request) {
  if (request.prompt_tokens >
      LongestPrompt(worker.max_model_len, worker.block_size, worker.num_blocks)) {
    return false;
  }
  return worker.is_prefill || worker.max_model_len == 0 ||
         request.total_tokens <= worker.max_model_len;
}

Decision Choose(const PolicyOptions& options, const RequestView& request,
                absl::Span<const WorkerView> workers, const PairBlocked& blocked,
                PolicyState* state) {
  Decision decision;
  PrefillPicker picker(options.policy, request, workers, blocked, state);
  std::vector<Option> candidates;
  for (int32_t d = 0; d < static_cast<int32_t>(workers.size()); ++d) {
    const WorkerView& decode = workers[d];
    if (!decode.can_decode || !HoldsLength(decode, request)) continue;
    const bool is_short =
        request.prompt_tokens - decode.cached_tokens <= options.local_prefill_tokens;
    const PrefillPicker::Result remote = is_short ? PrefillPicker::Result() : picker.PickFor(d);
    const bool may_be_local = is_short || decode.prefills_any_length;
    if (may_be_local) Improve(Feasibility::kLater, &decision.feasibility);
    if (remote.feasibility != Feasibility::kNever)
      Improve(Feasibility::kLater, &decision.feasibility);
    if (!HasRoom(options, decode, request)) continue;
    if (may_be_local || remote.feasibility != Feasibility::kNever) decision.decode_has_room = true;

    const double decode_cost = options.policy == Policy::kCost ? DecodeCostMs(decode, request)
                               : options.policy == Policy::kLeastLoad
                                   ? decode.requests * StepMs(decode)
                                   : 0;
    Option option = {.cached_tokens = decode.cached_tokens, .recent = decode.recent_assignments};
    double local_score = std::numeric_limits<double>::infinity();
    if (may_be_local) {
      const double prefill_ms = PrefillMs(decode, request);
      const double ttft = PrefillQueueMs(decode) + prefill_ms;
      // Computing the prompt here also delays every sequence that decodes here.
      const double delay = kDecodeWeight * decode.requests * prefill_ms;
      local_score = decode_cost;
      if (options.policy == Policy::kCost) {
        local_score += kTtftWeight * ttft + CapacityMs(decode, request) + delay;
      }
      option.choice = {.decode = d, .predicted_ttft_ms = ttft};
      option.choice.reason = is_short ? RouteReason::kShort
                             : remote.feasibility == Feasibility::kNever
                                 ? RouteReason::kNoPrefillWorker
                                 : RouteReason::kCheaper;
      option.score = local_score;
    }
    if (remote.feasibility == Feasibility::kNow) {
      const WorkerView& prefill = workers[remote.option.choice.prefill];
      const double ttft = PrefillQueueMs(prefill) + PrefillMs(prefill, request) +
                          TransferMs(decode, request) + StepMs(decode);
      double score = decode_cost;
      if (options.policy == Policy::kCost) {
        score += kTtftWeight * ttft + CapacityMs(prefill, request);
      }
      // Without a cost nothing says that the decode worker's own prefill is better.
      if (options.policy != Policy::kCost || score <= local_score) {
        option.choice = remote.option.choice;
        option.choice.predicted_ttft_ms = ttft;
        option.score = score;
      }
    } else if (remote.feasibility == Feasibility::kLater && options.policy != Policy::kCost) {
      continue;  // the prefill workers are busy, not gone
    }
    if (option.choice.decode >= 0) candidates.push_back(option);
  }
  if (candidates.empty()) return decision;
  decision.feasibility = Feasibility::kNow;
  decision.choice = options.policy == Policy::kRoundRobin
                        ? candidates[state->turn++ % candidates.size()].choice
                        : BreakTies(candidates, state).choice;
  return decision;
}

Decision ChooseDecodeForHeld(const PolicyOptions& options, const RequestView& request,
                             absl::Span<const WorkerView> workers, int32_t prefill,
                             const PairBlocked& blocked, PolicyState* state) {
  Decision decision;
  std::vector<Option> candidates;
  for (int32_t d = 0; d < static_cast<int32_t>(workers.size()); ++d) {
    const WorkerView& decode = workers[d];
    if (!decode.can_decode || !HoldsLength(decode, request) || blocked(prefill, d)) {
      continue;
    }
    Improve(Feasibility::kLater, &decision.feasibility);
    if (!HasRoom(options, decode, request)) continue;
    const double ttft = TransferMs(decode, request) + StepMs(decode);
    candidates.push_back({.choice = {.prefill = prefill, .decode = d, .predicted_ttft_ms = ttft},
                          .score = options.policy == Policy::kCost
                                       ? kTtftWeight * ttft + DecodeCostMs(decode, request)
                                       : decode.requests * StepMs(decode),
                          .cached_tokens = decode.cached_tokens,
                          .recent = decode.recent_assignments});
  }
  if (candidates.empty()) return decision;
  decision.feasibility = Feasibility::kNow;
  decision.choice = BreakTies(candidates, state).choice;
  return decision;
}

}  // namespace router

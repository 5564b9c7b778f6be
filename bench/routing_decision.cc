// How long the router takes to choose workers: 64 workers, a million indexed blocks.  Prints the
// medians and 99th percentiles of hashing the prompt, looking it up, and choosing, for prompts of
// 8192 and of 2048 tokens; DESIGN.md 7 asks for a decision of at most 200 us at the 99th
// percentile. Then the same while the workers' caches turn over, ten million events long: events
// per second, the longest time that one frame (also a message of a snapshot, and a restart) keeps a
// decision waiting, and memory.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <random>
#include <vector>

#include "block_hash/block_hash.h"
#include "router/event_loop.h"
#include "router/prefix_index.h"
#include "router/routing_policy.h"

namespace {

constexpr int kWorkers = 64;
constexpr int kBlocksPerWorker = 1000000 / kWorkers;
constexpr int kBlockSize = 64;
constexpr int kSharedBlocks = 16;  // a system prompt that every worker has
constexpr int kDecisions = 20000;
constexpr int64_t kEvents = 10'000'000;
constexpr int kEventsPerFrame = 64;  // half of them stored, half removed
constexpr int kPromptBlocks = 32;    // predicted with each decision
constexpr absl::Duration kBetweenDecisions = absl::Milliseconds(5);
constexpr int kSnapshotEvents = 64;  // in a message, as worker/watch_streams.cc has it

// Of this thread: what else runs on the machine does not count.
double CpuMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

double Since(double from) { return CpuMicroseconds() - from; }

void Print(const char* what, std::vector<double>* times) {
  std::sort(times->begin(), times->end());
  std::printf("  %-8s median %8.1f us   p99 %8.1f us   most %8.1f us\n", what,
              (*times)[times->size() / 2], (*times)[times->size() * 99 / 100], times->back());
}

double ResidentMegabytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages >> pages;
  return static_cast<double>(pages) * sysconf(_SC_PAGESIZE) / 1e6;
}

block_hash::BlockHash HashOf(uint64_t number) {
  std::mt19937_64 random(number);
  block_hash::BlockHash hash;
  for (size_t i = 0; i < hash.bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(&hash.bytes[i], &word, 8);
  }
  return hash;
}

using Frame = router::PrefixIndex::Frame;
using Event = router::PrefixIndex::Event;

// Ten million events, with decisions between them and now and then a snapshot or a restart.
void TurnOver(router::PrefixIndex* index, absl::Span<const block_hash::BlockHash> prompt,
              absl::Time now) {
  struct Cache {
    uint64_t seq = 0, oldest = 0, next = 0;  // its blocks are HashOf(worker << 40 | oldest .. next)
  };
  std::vector<Cache> caches(kWorkers);
  std::vector<double> frame_times, lookup_times, predict_times, swap_times;
  std::vector<block_hash::BlockHash> fresh(kPromptBlocks);
  uint64_t decisions = 0;
  const auto fill = [&](int slot, bool restart) {
    Cache& cache = caches[slot];
    if (restart) {
      const auto start = CpuMicroseconds();
      index->StartWorker(slot, "epoch", kBlocksPerWorker);
      swap_times.push_back(Since(start));
      cache.seq = 0;
    }
    cache.seq += 5;  // as after a gap
    cache.oldest = cache.next;
    while (cache.next - cache.oldest < kBlocksPerWorker) {
      Frame frame{.epoch = "epoch", .seq = cache.seq, .events = {}, .snapshot = true};
      for (int i = 0; i < kSnapshotEvents && cache.next - cache.oldest < kBlocksPerWorker; ++i) {
        frame.events.push_back({.hash = HashOf(uint64_t(slot) << 40 | cache.next++)});
      }
      frame.snapshot_end = cache.next - cache.oldest == kBlocksPerWorker;
      const auto start = CpuMicroseconds();
      index->Apply(slot, frame, now);
      swap_times.push_back(Since(start));
    }
  };
  for (int slot = 0; slot < kWorkers; ++slot) fill(slot, true);
  double seconds = 0;
  std::printf("caches turn over, frames of %d events\n", kEventsPerFrame);
  for (int64_t events = 0; events < kEvents;) {
    for (int slot = 0; slot < kWorkers; ++slot, events += kEventsPerFrame) {
      Cache& cache = caches[slot];
      Frame frame{.epoch = "epoch", .seq = ++cache.seq, .events = {}};
      for (int i = 0; i < kEventsPerFrame / 2; ++i) {
        frame.events.push_back(
            {.kind = Event::Kind::kRemoved, .hash = HashOf(uint64_t(slot) << 40 | cache.oldest++)});
        frame.events.push_back({.hash = HashOf(uint64_t(slot) << 40 | cache.next++)});
      }
      const auto start = CpuMicroseconds();
      index->Apply(slot, frame, now);
      frame_times.push_back(Since(start));
      seconds += frame_times.back() / 1e6;
    }
    for (int i = 0; i < kPromptBlocks; ++i) {
      fresh[i] = HashOf(uint64_t{kWorkers} << 40 | (decisions * kPromptBlocks + i));
    }
    now += kBetweenDecisions;
    const auto looking = CpuMicroseconds();
    index->Lookup(prompt, now);
    lookup_times.push_back(Since(looking));
    const auto predicting = CpuMicroseconds();
    index->Predict(static_cast<int>(decisions++ % kWorkers), fresh, kPromptBlocks, now);
    predict_times.push_back(Since(predicting));
    const int64_t round = events / (kWorkers * kEventsPerFrame);
    if (round % 50 == 0) fill(static_cast<int>(round / 50 % kWorkers), round % 100 == 0);
    if (events % (kEvents / 5) < kWorkers * kEventsPerFrame) {
      std::printf("  after %4.1f M events: %zu blocks, %.0f MB in the index, %.0f MB resident\n",
                  events / 1e6, index->num_entries(), index->approximate_bytes() / 1e6,
                  ResidentMegabytes());
      std::fflush(stdout);
    }
  }
  std::printf("  %.2f M events/s\n", kEvents / seconds / 1e6);
  Print("frame", &frame_times);
  Print("swap", &swap_times);
  Print("lookup", &lookup_times);
  Print("predict", &predict_times);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const block_hash::BlockHasher hasher(0);
  const block_hash::BlockHash root = hasher.Root("bench");
  router::PrefixIndex index({.stale_after = absl::Hours(1)});
  const absl::Time now = router::EventLoop::Now();
  // Each worker has conversations of 128 blocks that begin with the shared system prompt.
  std::vector<std::vector<int32_t>> conversations;
  std::vector<router::WorkerView> workers;
  for (int slot = 0; slot < kWorkers; ++slot) {
    index.StartWorker(slot, "epoch", kBlocksPerWorker);
    router::PrefixIndex::Frame frame;
    frame.epoch = "epoch";
    frame.seq = 1;
    for (int stored = 0; stored < kBlocksPerWorker; stored += 128 - kSharedBlocks) {
      std::vector<int32_t> tokens(128 * kBlockSize);
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = i < kSharedBlocks * kBlockSize ? static_cast<int32_t>(i)
                                                   : static_cast<int32_t>(random() % 100000);
      }
      for (const auto& hash : hasher.Chain(root, tokens, kBlockSize)) {
        frame.events.push_back({.kind = router::PrefixIndex::Event::Kind::kStored, .hash = hash});
      }
      if (stored < 1000) conversations.push_back(std::move(tokens));
    }
    index.Apply(slot, frame, now);
    router::WorkerView view;
    view.slot = slot;
    view.is_prefill = slot % 2 == 0;
    view.can_decode = !view.is_prefill;
    view.block_size = kBlockSize;
    view.block_bytes = 4 << 20;
    view.num_blocks = kBlocksPerWorker;
    view.prefill_tokens_per_s = 20000;
    view.decode_step_ms = 10;
    view.decode_step_ms_per_seq = 0.1;
    view.requests = slot % 7;
    workers.push_back(view);
  }
  std::printf("%d workers, %zu indexed blocks, %.0f MB\n", kWorkers, index.num_entries(),
              index.approximate_bytes() / 1e6);
  router::PolicyState state;
  const router::PolicyOptions options;
  for (const size_t prompt_tokens : {8192, 2048}) {
    std::vector<double> hash_times, lookup_times, choose_times;
    double seconds = 0;
    int64_t used = 0;
    for (int i = 0; i < kDecisions; ++i) {
      const auto tokens =
          absl::MakeConstSpan(conversations[random() % conversations.size()]).first(prompt_tokens);
      const auto start = CpuMicroseconds();
      const auto chain = hasher.Chain(root, tokens, kBlockSize);
      hash_times.push_back(Since(start));
      const auto looking = CpuMicroseconds();
      const std::vector<int32_t> matched = index.Lookup(chain, now);
      lookup_times.push_back(Since(looking));
      const auto choosing = CpuMicroseconds();
      for (auto& worker : workers) worker.cached_tokens = matched[worker.slot] * kBlockSize;
      const auto length = static_cast<int32_t>(prompt_tokens);
      const router::RequestView request = {
          .prompt_tokens = length + 1, .max_tokens = 256, .total_tokens = length + 257};
      const router::Decision decision = router::Choose(
          options, request, workers, [](int32_t, int32_t) { return false; }, &state);
      choose_times.push_back(Since(choosing));
      seconds += Since(start) / 1e6;
      used += decision.choice.decode;
    }
    std::printf("prompts of %zu tokens: %.0f decisions/s a core (%lld)\n", prompt_tokens,
                kDecisions / seconds, static_cast<long long>(used));
    Print("hash", &hash_times);
    Print("lookup", &lookup_times);
    Print("choose", &choose_times);
  }
  TurnOver(&index, hasher.Chain(root, conversations.front(), kBlockSize), now);
  return 0;
}

// The PrefixIndex over random histories of workers and their streams, beside a naive model.

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "router/prefix_index.h"
#include "tests/router/kv_frames.h"

namespace router {
namespace {

using Applied = PrefixIndex::Applied;

constexpr absl::Duration kStale = absl::Seconds(5);
constexpr absl::Duration kTtl = absl::Seconds(3);
const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);

// A worker process with its log of frames, and what a naive reader makes of the same stream.
struct Process {
  std::string epoch;
  std::vector<Frame> log;  // seq 1, 2, ...
  std::set<int> blocks;    // now
  std::set<int> seen;      // what the reader should believe
  uint64_t delivered = 0;  // last frame that the reader has
  std::map<int, absl::Time> predicted;
};

TEST(PrefixIndexHistoryTest, EqualsANaiveModelOverRandomHistories) {
  constexpr int kWorkers = 5;
  constexpr int kBlocks = 24;
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed=" << seed);
    std::mt19937 random(seed);
    const auto draw = [&](int n) { return static_cast<int>(random() % n); };
    PrefixIndex index({.stale_after = kStale, .predicted_ttl = kTtl, .max_predicted = 100000});
    std::vector<Process> workers(kWorkers);
    absl::Time now = kStart;
    int lives = 0;
    const auto start = [&](int w) {
      workers[w] = Process();
      workers[w].epoch = std::to_string(++lives);
      index.StartWorker(w, workers[w].epoch, 1000);
      ASSERT_EQ(index.Apply(w, Heartbeat(workers[w].epoch, 0), now), Applied::kApplied);
    };
    const auto apply_to_model = [](Process* process, const Frame& frame) {
      for (const Event& event : frame.events) {
        const int value = event.hash.bytes[0] | event.hash.bytes[1] << 8;
        if (event.kind == Event::Kind::kStored) process->seen.insert(value);
        if (event.kind == Event::Kind::kRemoved) process->seen.erase(value);
        if (event.kind == Event::Kind::kCleared) process->seen.clear();
      }
      process->delivered = frame.seq;
    };
    for (int w = 0; w < kWorkers; ++w) start(w);
    for (int step = 0; step < 300; ++step) {
      const int w = draw(kWorkers);
      Process& process = workers[w];
      now += absl::Milliseconds(draw(200));
      switch (draw(12)) {
        default: {  // the worker does something, and tells
          Frame frame = Live(process.epoch, process.log.size() + 1, {});
          for (int e = 0; e <= draw(4); ++e) {
            const int value = draw(kBlocks);
            if (draw(40) == 0) {
              frame.events.push_back({.kind = Event::Kind::kCleared, .hash = {}});
            } else {
              frame.events.push_back(draw(3) > 0 ? Stored(value) : Removed(value));
            }
          }
          process.log.push_back(frame);
          for (const Event& event : frame.events) {
            const int value = event.hash.bytes[0] | event.hash.bytes[1] << 8;
            if (event.kind == Event::Kind::kStored) process.blocks.insert(value);
            if (event.kind == Event::Kind::kRemoved) process.blocks.erase(value);
            if (event.kind == Event::Kind::kCleared) process.blocks.clear();
          }
          if (draw(4) == 0) break;  // the frame is lost
          const Applied applied = index.Apply(w, frame, now);
          if (process.delivered + 1 == frame.seq) {
            ASSERT_EQ(applied, Applied::kApplied);
            apply_to_model(&process, frame);
          } else {
            ASSERT_EQ(applied, Applied::kGap);
          }
          break;
        }
        case 7: {  // an old frame comes again
          if (process.delivered == 0) break;
          ASSERT_EQ(index.Apply(w, process.log[draw(static_cast<int>(process.delivered))], now),
                    Applied::kApplied);
          break;
        }
        case 8: {  // replay of what is missing
          ASSERT_EQ(index.next_seq(w), process.delivered + 1);
          for (uint64_t seq = process.delivered + 1; seq <= process.log.size(); ++seq) {
            ASSERT_EQ(index.Apply(w, process.log[seq - 1], now), Applied::kApplied);
            apply_to_model(&process, process.log[seq - 1]);
          }
          break;
        }
        case 9: {  // a snapshot, in pieces
          std::vector<int> all(process.blocks.begin(), process.blocks.end());
          std::shuffle(all.begin(), all.end(), random);
          const int pieces = 1 + draw(3);
          for (int p = 0; p < pieces; ++p) {
            Frame frame = Live(process.epoch, process.log.size(), {});
            frame.snapshot = true;
            frame.snapshot_end = p + 1 == pieces;
            for (size_t i = p; i < all.size(); i += pieces) frame.events.push_back(Stored(all[i]));
            ASSERT_EQ(index.Apply(w, frame, now), Applied::kApplied);
          }
          process.seen = process.blocks;
          process.delivered = process.log.size();
          break;
        }
        case 10: {
          if (draw(5) == 0) start(w);  // restart
          break;
        }
        case 11: {
          std::vector<BlockHash> chain;
          for (int i = 0; i < draw(6); ++i) {
            const int value = draw(kBlocks);
            chain.push_back(Hash(value));
            if (!process.seen.contains(value)) process.predicted[value] = now + kTtl;
          }
          index.Predict(w, chain, chain.size(), now);
          break;
        }
      }
      // Everybody who has missed nothing says so, so that nobody is stale.
      for (int v = 0; v < kWorkers; ++v) {
        index.Apply(v, Heartbeat(workers[v].epoch, workers[v].delivered), now);
      }
      std::vector<int> values;
      for (int i = 0; i < 1 + draw(8); ++i) values.push_back(draw(kBlocks));
      std::vector<BlockHash> chain;
      for (const int value : values) chain.push_back(Hash(value));
      const std::vector<int32_t> matched = index.Lookup(chain, now);
      size_t entries = 0;
      for (int v = 0; v < kWorkers; ++v) {
        int32_t expected = 0;
        for (const int value : values) {
          const auto predicted = workers[v].predicted.find(value);
          const bool soon = predicted != workers[v].predicted.end() && predicted->second > now;
          if (!workers[v].seen.contains(value) && !soon) break;
          ++expected;
        }
        ASSERT_EQ(matched[v], expected) << "step=" << step << " worker=" << v;
        entries += workers[v].seen.size();
      }
      ASSERT_EQ(index.num_entries(), entries);
    }
  }
}

}  // namespace
}  // namespace router

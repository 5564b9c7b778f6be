// PrefixIndex: which worker has which cached blocks, exactly as the workers tell it
// (serving.md 6.2), plus blocks that a worker is about to have because a request was just sent
// there ("predicted", short-lived).
//
// One map of block hash -> set of workers answers a lookup with one probe per block of the prompt,
// whatever the number of workers.  A worker never has more entries than blocks, predictions are
// bounded by number and time, so the index is bounded.
//
// No worker's news keeps the others waiting: what it had before a snapshot, a clearing or a restart
// goes out of sight at once and out of the map little by little, a few entries with each call, and
// no table is so large that its growth takes long (hash_parts.h).
//
// Owned by the loop's thread.  Times are EventLoop::Now().

#ifndef ROUTER_PREFIX_INDEX_H_
#define ROUTER_PREFIX_INDEX_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"
#include "router/hash_parts.h"

namespace router {

using WorkerSlot = int32_t;  // a worker's place in the registry, 0, 1, ...

class PrefixIndex final {
 public:
  struct Options {
    absl::Duration stale_after = absl::Seconds(5);  // without a frame: no credit for the worker
    absl::Duration predicted_ttl = absl::Seconds(3);
    size_t max_predicted = 65536;  // entries; the oldest go first
  };
  struct Event {
    enum class Kind { kStored, kRemoved, kCleared };
    Kind kind = Kind::kStored;
    block_hash::BlockHash hash;  // unused by kCleared
    bool resumable = true;       // of kStored: a prompt can go on behind it
  };
  // As ferry.v1.KvEventFrame.
  struct Frame {
    std::string epoch;
    uint64_t seq = 0;
    std::vector<Event> events;
    bool snapshot = false;
    bool snapshot_end = false;
    bool heartbeat = false;
  };
  enum class Applied {
    kApplied,
    kGap,         // frames are missing: nothing applied, the view is kept; ask again from next_seq
    kOtherEpoch,  // of another life of the worker: nothing applied
  };

  explicit PrefixIndex(const Options& options) : options_(options) {}

  // A worker (or its next life) with at most `max_blocks` blocks: whatever the slot had is dropped.
  // `keeps_state`: its model keeps a state per sequence, so a block alone is not resumable.
  void StartWorker(WorkerSlot slot, const std::string& epoch, size_t max_blocks,
                   bool keeps_state = false);
  void DropWorker(WorkerSlot slot);

  // Applies the next frame of the worker's stream.  Frames seen before and removals of unknown
  // blocks change nothing.  A snapshot replaces the view when its last frame has come.
  Applied Apply(WorkerSlot slot, const Frame& frame, absl::Time now);
  // First frame not applied yet.
  uint64_t next_seq(WorkerSlot slot) const;

  // The worker will soon have the blocks of a prompt that it computes.  One that keeps a state will
  // have a snapshot behind the last of the first `reusable` ones, those before the prompt's last
  // token; where else it takes some is known only when it is told.
  void Predict(WorkerSlot slot, absl::Span<const block_hash::BlockHash> chain, size_t reusable,
               absl::Time now);

  // How many leading blocks of `chain` each slot has and a prompt can go on behind; 0 for a worker
  // whose view is stale.
  std::vector<int32_t> Lookup(absl::Span<const block_hash::BlockHash> chain, absl::Time now);

  // For metrics.
  size_t num_entries() const { return num_entries_; }  // (worker, block) pairs announced
  size_t num_retired() const { return num_retired_; }  // those out of sight, not out of memory yet
  size_t num_views() const { return views_.size(); }   // a Lookup looks at a bit of each
  size_t num_predicted() const;
  size_t approximate_bytes() const;
  int64_t num_gaps() const { return num_gaps_; }
  int64_t num_snapshots() const { return num_snapshots_; }
  int64_t num_untrusted(absl::Time now) const;

 private:
  // A set of small numbers; two words are inline.
  using Bits = absl::InlinedVector<uint64_t, 2>;
  // What one worker has told of its blocks since it was last empty.  The number of its view marks a
  // worker's blocks in `holders_`; another view, another number.
  using ViewNumber = int32_t;  // -1: none
  static constexpr size_t kBlockParts = 32;
  using Blocks = HashParts<bool, kBlockParts>;  // is it resumable?
  struct View {
    WorkerSlot owner = -1;  // -1: free, or retired
    Blocks blocks;
  };
  struct Retired {
    ViewNumber number;
    size_t next_part = 0;  // of its blocks: not out of `holders_` yet
  };
  struct Holders {
    Bits announced;  // by view
    Bits predicted;  // by slot
    bool empty() const;
  };
  static constexpr size_t kPredictedParts = 16;
  struct Until {
    absl::Time time;
    bool resumable = false;
  };
  struct Worker {
    bool present = false;
    std::string epoch;
    size_t max_blocks = 0;
    bool keeps_state = false;  // of sequences
    uint64_t last_seq = 0;
    absl::Time last_frame = absl::InfinitePast();
    ViewNumber view = -1;
    ViewNumber staged = -1;   // the snapshot being read
    uint64_t staged_seq = 0;  // its number
    HashParts<Until, kPredictedParts> predicted;
  };
  struct Prediction {
    absl::Time until;
    WorkerSlot slot;
    block_hash::BlockHash hash;
  };

  bool Trusted(const Worker& worker, absl::Time now) const;
  // Of a block that the worker has, or soon will.
  bool Resumable(WorkerSlot slot, const block_hash::BlockHash& hash) const;
  // Takes the mark out; the block's entry too when it was the last one.
  void Unmark(const block_hash::BlockHash& hash, Bits Holders::*bits, int32_t number);
  ViewNumber NewView(WorkerSlot owner);
  void Retire(ViewNumber number);
  void Sweep(size_t entries);
  void Store(ViewNumber number, size_t max_blocks, const Event& event);
  void Remove(ViewNumber number, const block_hash::BlockHash& hash);
  void ApplySnapshot(WorkerSlot slot, const Frame& frame);
  void ApplyEvents(WorkerSlot slot, const Frame& frame);
  void ExpirePredictions(absl::Time now);

  const Options options_;
  std::vector<Worker> workers_;  // by slot
  std::deque<View> views_;       // by number
  std::vector<ViewNumber> free_views_;
  std::deque<Retired> retired_;
  HashParts<Holders, 1024> holders_;
  std::deque<Prediction> predicted_order_;  // by `until`; a renewed one is in it twice
  size_t num_entries_ = 0;
  size_t num_retired_ = 0;
  int64_t num_gaps_ = 0;
  int64_t num_snapshots_ = 0;
};

}  // namespace router

#endif  // ROUTER_PREFIX_INDEX_H_

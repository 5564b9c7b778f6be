// PairTable: which prefill workers can send their blocks to which decode workers, and why not. What
// the two say in GetInfo is compared when either introduces itself; what only a try can find out is
// remembered by Mark.  Both last until one of the two is another process.
//
// Owned by the loop's thread.

#ifndef ROUTER_PAIR_TABLE_H_
#define ROUTER_PAIR_TABLE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pairing/pair_check.h"
#include "router/prefix_index.h"

namespace router {

class PairTable final {
 public:
  // A worker process.
  struct Worker {
    std::string epoch;  // empty: nobody known
    bool is_prefill = false;
    std::string model;  // workers of different models are no pair
    pairing::Profile profile;
  };

  // Who is at `slot` now; a default Worker: nobody.  The same epoch again changes nothing.  Returns
  // whether it is a new one.
  bool Update(WorkerSlot slot, const Worker& worker);

  // A try has shown that the two do not fit.  False if either is no longer that process.
  bool Mark(WorkerSlot prefill, const std::string& prefill_epoch, WorkerSlot decode,
            const std::string& decode_epoch, const std::string& why);

  // Why blocks of `prefill` cannot go to `decode`, with the values of both; empty if they can.
  const std::string& why(WorkerSlot prefill, WorkerSlot decode) const;
  bool fits(WorkerSlot prefill, WorkerSlot decode) const {
    return why_.empty() || why(prefill, decode).empty();
  }

 private:
  std::vector<Worker> workers_;  // by slot
  // Of pairs that do not fit, by prefill and decode slot.
  absl::flat_hash_map<std::pair<WorkerSlot, WorkerSlot>, std::string> why_;
};

}  // namespace router

#endif  // ROUTER_PAIR_TABLE_H_

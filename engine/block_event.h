// BlockEvent: one change of what a worker says it has cached.  Plain value.

#ifndef ENGINE_BLOCK_EVENT_H_
#define ENGINE_BLOCK_EVENT_H_

#include "block_hash/block_hash.h"

namespace engine {

struct BlockEvent {
  bool stored = false;  // else removed
  block_hash::BlockHash hash;
  block_hash::BlockHash parent;  // of a stored block; the chain's root for the first
};

}  // namespace engine

#endif  // ENGINE_BLOCK_EVENT_H_

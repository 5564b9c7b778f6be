// Frames of KV events and chains of blocks for tests of the PrefixIndex; a block is a small number.

#ifndef TESTS_ROUTER_KV_FRAMES_H_
#define TESTS_ROUTER_KV_FRAMES_H_

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "router/prefix_index.h"

namespace router {

using block_hash::BlockHash;
using Event = PrefixIndex::Event;
using Frame = PrefixIndex::Frame;

inline BlockHash Hash(int value) {
  BlockHash hash;
  hash.bytes[0] = static_cast<uint8_t>(value);
  hash.bytes[1] = static_cast<uint8_t>(value >> 8);
  return hash;
}
inline Event Stored(int value) { return {.kind = Event::Kind::kStored, .hash = Hash(value)}; }
inline Event Removed(int value) { return {.kind = Event::Kind::kRemoved, .hash = Hash(value)}; }
inline Frame Live(const std::string& epoch, uint64_t seq, std::vector<Event> events) {
  Frame frame;
  frame.epoch = epoch;
  frame.seq = seq;
  frame.events = std::move(events);
  return frame;
}
inline Frame Heartbeat(const std::string& epoch, uint64_t seq) {
  Frame frame = Live(epoch, seq, {});
  frame.heartbeat = true;
  return frame;
}
inline std::vector<BlockHash> Chain(std::initializer_list<int> values) {
  std::vector<BlockHash> chain;
  for (const int value : values) chain.push_back(Hash(value));
  return chain;
}

}  // namespace router

#endif  // TESTS_ROUTER_KV_FRAMES_H_

#include "router/length_limits.h"

#include <algorithm>
#include <limits>

namespace router {
namespace {

constexpr int32_t kAny = std::numeric_limits<int32_t>::max();

}  // namespace

int32_t LongestPrompt(int32_t max_model_len, int32_t block_size, int32_t num_blocks) {
  const int64_t cache = int64_t{block_size} * num_blocks;
  const int64_t context = max_model_len > 0 ? max_model_len : kAny;
  return static_cast<int32_t>(std::max<int64_t>(0, std::min(cache, context) - 1));
}

LengthLimits LengthLimits::OfContext(int32_t context) {
  LengthLimits limits;
  const int32_t total = context > 0 ? context : kAny;
  limits.Add({.prompt = total - 1, .total = total});
  return limits;
}

WorkerLimits WorkerLimits::OfContext(int32_t context) {
  return {.serving = LengthLimits::OfContext(context),
          .serving_context = context,
          .known = LengthLimits::OfContext(context),
          .known_context = context,
          .all_known = true};
}

void LengthLimits::Add(const LengthRoom& room) {
  if (room.prompt < 1 || Holds(room.prompt, room.total)) return;
  std::erase_if(rooms_, [&](const LengthRoom& other) {
    return other.prompt <= room.prompt && other.total <= room.total;
  });
  rooms_.push_back(room);
}

LengthLimits LengthLimits::Within(int32_t context) const {
  if (context <= 0) return *this;
  LengthLimits within;
  for (const LengthRoom& room : rooms_) {
    within.Add(
        {.prompt = std::min(room.prompt, context - 1), .total = std::min(room.total, context)});
  }
  return within;
}

int32_t LengthLimits::prompt() const {
  int32_t longest = 0;
  for (const LengthRoom& room : rooms_) longest = std::max(longest, room.prompt);
  return longest;
}

int32_t LengthLimits::TotalFor(int64_t prompt) const {
  int32_t most = 0;
  for (const LengthRoom& room : rooms_) {
    if (prompt <= room.prompt) most = std::max(most, room.total);
  }
  return most;
}

}  // namespace router

// LengthLimits: how long prompts and outputs can be at the workers of a model, as rooms: one of
// each pair of workers, or worker alone, that can serve a request together.
//
// A value; thread-compatible.

#ifndef ROUTER_LENGTH_LIMITS_H_
#define ROUTER_LENGTH_LIMITS_H_

#include <cstdint>
#include <vector>

namespace router {

struct LengthRoom {
  int32_t prompt = 0;  // tokens of the longest prompt
  int32_t total = 0;   // most tokens of prompt and output; more than `prompt`
};

// The longest prompt that a worker with these facts takes; one token must fit behind it.
// `max_model_len` 0: not stated.
int32_t LongestPrompt(int32_t max_model_len, int32_t block_size, int32_t num_blocks);

class LengthLimits final {
 public:
  // Of a model whose prompts and outputs have at most `context` tokens; 0: any number.
  static LengthLimits OfContext(int32_t context);

  void Add(const LengthRoom& room);
  // As far as they lie within those of `context`.
  LengthLimits Within(int32_t context) const;

  bool empty() const { return rooms_.empty(); }
  bool Holds(int64_t prompt, int64_t total) const { return total <= TotalFor(prompt); }
  // The longest prompt; 0: there is no room.
  int32_t prompt() const;
  // The most tokens that such a prompt and its output may have; 0: it is too long itself.
  int32_t TotalFor(int64_t prompt) const;

 private:
  std::vector<LengthRoom> rooms_;  // none lies within another
};

// What is known of the workers of a model.
struct WorkerLimits {
  // Of one worker that serves requests of `context` tokens alone.
  static WorkerLimits OfContext(int32_t context);

  LengthLimits serving;  // of those that serve now and fit each other
  // Tokens of the longest prompt of theirs and one behind it, where any shorter one is served as
  // well; 0: some prompts find nobody who computes them.
  int32_t serving_context = 0;
  // With those that are away, and pairs that do not fit: a process that is started anew may mend
  // that.  Where nobody is known who prefills, as if there were somebody.
  LengthLimits known;
  int32_t known_context = 0;
  bool all_known = false;  // every worker has been asked who it is
};

}  // namespace router

#endif  // ROUTER_LENGTH_LIMITS_H_

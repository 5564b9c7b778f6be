// A load trace: the conversations that `ferry bench` holds with a server, made from a seed or read
// from a file.
//
// A conversation is a list of turns; a turn's prompt is what it adds to all that came before it in
// its conversation, prompts and answers.  A single request is a conversation of one turn.

#ifndef CLI_LOAD_TRACE_H_
#define CLI_LOAD_TRACE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace cli {

// One of the three is given.
struct Prompt {
  std::vector<uint32_t> ids = {};
  std::string text = {};
  std::string messages = {};  // a JSON array, for chat
};

struct Turn {
  Prompt prompt = {};
  int32_t output_tokens = 0;
};

struct Conversation {
  std::vector<Turn> turns = {};
  // Tokens at the start of the first prompt that an earlier conversation began with too; absent:
  // not known.
  std::optional<int32_t> shared_tokens = {};
};

// Thread-safe: immutable.
class Trace {
 public:
  virtual ~Trace() = default;
  virtual int32_t num_conversations() const = 0;
  virtual int32_t num_requests() const = 0;  // turns of all
  // The same for the same index.  REQUIRES: 0 <= index < num_conversations().
  virtual Conversation Get(int32_t index) const = 0;
  virtual std::string Describe() const = 0;  // "16 requests of 512 in, 32 out"
};

struct Lengths {
  int32_t low = 1;
  int32_t high = 1;  // each of low..high as likely

  std::string Text() const;  // "512", "100:300"
};

// Errors: kInvalidArgument unless `text` is N or LOW:HIGH with 1 <= LOW <= HIGH <= 2^24.
absl::StatusOr<Lengths> ParseLengths(const std::string& text);

struct TraceShape {
  int32_t num_conversations = 1;
  int32_t turns = 1;   // of each conversation
  Lengths input = {};  // random tokens that each turn adds
  Lengths output = {};
  int32_t shared_prefix_tokens = 0;  // stand before a conversation's first ones
  int32_t prefix_groups = 1;         // conversation i begins with prefix i mod prefix_groups
  uint32_t vocab_size = 1;
  uint64_t seed = 0;
};
std::unique_ptr<Trace> MakeTrace(const TraceShape& shape);

// A JSON object a line: `prompt` (text or a list of ids) or `messages`, and `output_tokens`; where
// that is absent `output` draws it.  `max_requests`: the first ones only; 0: all. Errors:
// kNotFound, kInvalidArgument naming file, line and value; fewer lines than max_requests.
absl::StatusOr<std::unique_ptr<Trace>> ReadDataset(const std::string& path, int32_t max_requests,
                                                   const Lengths& output, uint64_t seed);

// A trace of which nothing is told but lengths and which blocks of 512 tokens prompts have in
// common, as those that Mooncake has published: a JSON object a line with input_length,
// output_length and hash_ids, a number for each block of the prompt.  Equal numbers become equal
// random ids.  Errors: as of ReadDataset.
absl::StatusOr<std::unique_ptr<Trace>> ReadBlockTrace(const std::string& path, int32_t max_requests,
                                                      uint32_t vocab_size, uint64_t seed);

// Random ids that stand for the answer of a turn where the server does not tell its ids.
std::vector<uint32_t> StandInAnswer(int32_t conversation, int32_t turn, int32_t tokens,
                                    uint32_t vocab_size, uint64_t seed);

}  // namespace cli

#endif  // CLI_LOAD_TRACE_H_

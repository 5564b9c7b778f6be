#include "cli/load_trace.h"

#include <algorithm>
#include <functional>
#include <random>
#include <unordered_map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "input_file/input_file.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace cli {
namespace {

constexpr int32_t kMaxTokens = 1 << 24;
constexpr int32_t kBlockTokens = 512;  // of a block trace
constexpr int64_t kMaxDatasetBytes = int64_t{4} << 30;

// What random numbers are for: different ones for each purpose and number.
enum class Purpose : uint32_t { kPrefix, kConversation, kAnswer, kOutputLength, kBlock };

std::mt19937 Random(uint64_t seed, Purpose purpose, uint32_t number, uint32_t part = 0) {
  std::seed_seq all{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                    static_cast<uint32_t>(purpose), number, part};
  return std::mt19937(all);
}

int32_t Draw(const Lengths& lengths, std::mt19937& random) {
  return lengths.low +
         static_cast<int32_t>(random() % static_cast<uint32_t>(lengths.high - lengths.low + 1));
}

void AddIds(int32_t count, uint32_t vocab_size, std::mt19937& random, std::vector<uint32_t>* ids) {
  for (int32_t i = 0; i < count; ++i) ids->push_back(random() % vocab_size);
}

class GeneratedTrace final : public Trace {
 public:
  explicit GeneratedTrace(const TraceShape& shape) : shape_(shape) {}

  int32_t num_conversations() const override { return shape_.num_conversations; }
  int32_t num_requests() const override { return shape_.num_conversations * shape_.turns; }

  Conversation Get(int32_t index) const override {
    Conversation conversation;
    conversation.shared_tokens = index >= shape_.prefix_groups ? shape_.shared_prefix_tokens : 0;
    std::mt19937 random = Random(shape_.seed, Purpose::kConversation, index);
    for (int32_t number = 0; number < shape_.turns; ++number) {
      Turn turn;
      if (number == 0) {
        std::mt19937 prefix = Random(shape_.seed, Purpose::kPrefix, index % shape_.prefix_groups);
        AddIds(shape_.shared_prefix_tokens, shape_.vocab_size, prefix, &turn.prompt.ids);
      }
      AddIds(Draw(shape_.input, random), shape_.vocab_size, random, &turn.prompt.ids);
      turn.output_tokens = Draw(shape_.output, random);
      conversation.turns.push_back(std::move(turn));
    }
    return conversation;
  }

  std::string Describe() const override {
    std::string text = absl::StrCat(num_requests(), " requests of ", shape_.input.Text(), " in, ",
                                    shape_.output.Text(), " out");
    if (shape_.turns > 1) {
      absl::StrAppend(&text, " in ", num_conversations(), " conversations of ", shape_.turns,
                      " turns");
    }
    if (shape_.shared_prefix_tokens > 0) {
      absl::StrAppend(&text, " after a prefix of ", shape_.shared_prefix_tokens, ", one of ",
                      shape_.prefix_groups);
    }
    return text;
  }

 private:
  const TraceShape shape_;
};

class Dataset final : public Trace {
 public:
  Dataset(std::string path, std::vector<Turn> turns)
      : path_(std::move(path)), turns_(std::move(turns)) {}

  int32_t num_conversations() const override { return static_cast<int32_t>(turns_.size()); }
  int32_t num_requests() const override { return num_conversations(); }
  Conversation Get(int32_t index) const override { return {.turns = {turns_[index]}}; }
  std::string Describe() const override {
    return absl::StrCat(num_requests(), " requests of ", path_);
  }

 private:
  const std::string path_;
  const std::vector<Turn> turns_;
};

// A request of a block trace: its prompt is the blocks' tokens, cut to input_tokens.
struct BlockRequest {
  std::vector<uint64_t> blocks = {};
  int32_t input_tokens = 0;
  int32_t output_tokens = 0;
  int32_t shared_tokens = 0;

  // How many tokens of the prompt its block `i` has.
  int32_t TokensOf(size_t i) const {
    return std::min(kBlockTokens, input_tokens - static_cast<int32_t>(i) * kBlockTokens);
  }
};

class BlockTrace final : public Trace {
 public:
  BlockTrace(std::string path, std::vector<BlockRequest> requests, uint32_t vocab_size,
             uint64_t seed)
      : path_(std::move(path)),
        requests_(std::move(requests)),
        vocab_size_(vocab_size),
        seed_(seed) {}

  int32_t num_conversations() const override { return static_cast<int32_t>(requests_.size()); }
  int32_t num_requests() const override { return num_conversations(); }
  Conversation Get(int32_t index) const override {
    const BlockRequest& request = requests_[index];
    Turn turn = {.output_tokens = request.output_tokens};
    for (size_t i = 0; i < request.blocks.size(); ++i) {
      const uint64_t block = request.blocks[i];
      std::mt19937 random = Random(seed_, Purpose::kBlock, static_cast<uint32_t>(block),
                                   static_cast<uint32_t>(block >> 32));
      AddIds(request.TokensOf(i), vocab_size_, random, &turn.prompt.ids);
    }
    return {.turns = {std::move(turn)}, .shared_tokens = request.shared_tokens};
  }
  std::string Describe() const override {
    return absl::StrCat(num_requests(), " requests of ", path_);
  }

 private:
  const std::string path_;
  const std::vector<BlockRequest> requests_;
  const uint32_t vocab_size_;
  const uint64_t seed_;
};

// Calls `take` with the JSON object of every line that is not empty, of the first `max_requests`
// ones (0: all).  Errors: those of `take`, and of lines and files that are none, naming them.
absl::Status ForEachLine(const std::string& path, int32_t max_requests,
                         const std::function<absl::Status(const nlohmann::json&)>& take) {
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(path, kMaxDatasetBytes));
  int32_t requests = 0;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (max_requests > 0 && requests == max_requests) break;
    ++number;
    if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
    const auto object =
        nlohmann::json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
    const absl::Status taken =
        object.is_object() ? take(object) : absl::InvalidArgumentError("not a JSON object");
    if (!taken.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": ", std::string(taken.message())));
    }
    ++requests;
  }
  if (requests == 0 || requests < max_requests) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", requests, " requests",
                     max_requests > 0 ? absl::StrCat(", --requests is ", max_requests) : ""));
  }
  return absl::OkStatus();
}

// A member that counts tokens; 0 where it is absent.
absl::StatusOr<int32_t> TokensMember(const nlohmann::json& line, const char* name) {
  const auto found = line.find(name);
  if (found == line.end()) return 0;
  if (!found->is_number_unsigned() || *found < 1 || *found > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", found->dump(), ", it must be 1 to ", kMaxTokens));
  }
  return found->get<int32_t>();
}

absl::StatusOr<Prompt> ParsePrompt(const nlohmann::json& line) {
  const auto prompt = line.find("prompt");
  const auto messages = line.find("messages");
  if ((prompt == line.end()) == (messages == line.end())) {
    return absl::InvalidArgumentError("needs prompt or messages, and one of them only");
  }
  if (messages != line.end()) {
    if (messages->is_array() && !messages->empty()) return Prompt{.messages = messages->dump()};
    return absl::InvalidArgumentError("messages is not a list of messages");
  }
  if (prompt->is_string() && !prompt->get_ref<const std::string&>().empty()) {
    return Prompt{.text = *prompt};
  }
  Prompt ids;
  if (prompt->is_array()) {
    for (const nlohmann::json& id : *prompt) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > UINT32_MAX) {
        return absl::InvalidArgumentError(
            absl::StrCat("prompt has ", id.dump(), ", which is no token id"));
      }
      ids.ids.push_back(id);
    }
  }
  if (ids.ids.empty()) {
    return absl::InvalidArgumentError("prompt is neither a text nor a list of token ids");
  }
  return ids;
}

absl::StatusOr<BlockRequest> ParseBlocks(const nlohmann::json& line) {
  BlockRequest request;
  ASSIGN_OR_RETURN(request.input_tokens, TokensMember(line, "input_length"));
  ASSIGN_OR_RETURN(request.output_tokens, TokensMember(line, "output_length"));
  const auto blocks = line.find("hash_ids");
  if (request.input_tokens == 0 || request.output_tokens == 0 || blocks == line.end() ||
      !blocks->is_array()) {
    return absl::InvalidArgumentError("needs input_length, output_length and the list hash_ids");
  }
  for (const nlohmann::json& block : *blocks) {
    if (!block.is_number_unsigned()) {
      return absl::InvalidArgumentError(
          absl::StrCat("hash_ids has ", block.dump(), ", which is no number of a block"));
    }
    request.blocks.push_back(block);
  }
  const int32_t needed = (request.input_tokens + kBlockTokens - 1) / kBlockTokens;
  if (request.blocks.size() != static_cast<size_t>(needed)) {
    return absl::InvalidArgumentError(absl::StrCat("input_length ", request.input_tokens, " takes ",
                                                   needed, " blocks of ", kBlockTokens,
                                                   ", hash_ids has ", request.blocks.size()));
  }
  return request;
}

}  // namespace

std::string Lengths::Text() const {
  return low == high ? absl::StrCat(low) : absl::StrCat(low, ":", high);
}

absl::StatusOr<Lengths> ParseLengths(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  Lengths lengths;
  if (parts.size() <= 2 && absl::SimpleAtoi(parts.front(), &lengths.low) &&
      absl::SimpleAtoi(parts.back(), &lengths.high) && 1 <= lengths.low &&
      lengths.low <= lengths.high && lengths.high <= kMaxTokens) {
    return lengths;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      text, " is no number of tokens: give N, or LOW:HIGH with 1 <= LOW <= HIGH <= ", kMaxTokens));
}

std::unique_ptr<Trace> MakeTrace(const TraceShape& shape) {
  return std::make_unique<GeneratedTrace>(shape);
}

absl::StatusOr<std::unique_ptr<Trace>> ReadDataset(const std::string& path, int32_t max_requests,
                                                   const Lengths& output, uint64_t seed) {
  std::mt19937 random = Random(seed, Purpose::kOutputLength, 0);
  std::vector<Turn> turns;
  RETURN_IF_ERROR(ForEachLine(path, max_requests, [&](const nlohmann::json& line) -> absl::Status {
    Turn turn;
    ASSIGN_OR_RETURN(turn.prompt, ParsePrompt(line));
    ASSIGN_OR_RETURN(turn.output_tokens, TokensMember(line, "output_tokens"));
    if (turn.output_tokens == 0) turn.output_tokens = Draw(output, random);
    turns.push_back(std::move(turn));
    return absl::OkStatus();
  }));
  return std::make_unique<Dataset>(path, std::move(turns));
}

absl::StatusOr<std::unique_ptr<Trace>> ReadBlockTrace(const std::string& path, int32_t max_requests,
                                                      uint32_t vocab_size, uint64_t seed) {
  std::vector<BlockRequest> requests;
  std::unordered_map<uint64_t, int32_t> seen;  // block: the most of its tokens in a prompt so far
  RETURN_IF_ERROR(ForEachLine(path, max_requests, [&](const nlohmann::json& line) -> absl::Status {
    ASSIGN_OR_RETURN(BlockRequest request, ParseBlocks(line));
    bool shared = true;
    for (size_t i = 0; i < request.blocks.size(); ++i) {
      int32_t& most = seen[request.blocks[i]];
      if (shared) request.shared_tokens += std::min(most, request.TokensOf(i));
      shared = shared && most == kBlockTokens;
      most = std::max(most, request.TokensOf(i));
    }
    requests.push_back(std::move(request));
    return absl::OkStatus();
  }));
  return std::make_unique<BlockTrace>(path, std::move(requests), vocab_size, seed);
}

std::vector<uint32_t> StandInAnswer(int32_t conversation, int32_t turn, int32_t tokens,
                                    uint32_t vocab_size, uint64_t seed) {
  std::mt19937 random = Random(seed, Purpose::kAnswer, conversation, turn);
  std::vector<uint32_t> ids;
  AddIds(tokens, vocab_size, random, &ids);
  return ids;
}

}  // namespace cli

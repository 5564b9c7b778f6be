#include "cli/load_trace.h"

#include <random>
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
constexpr int64_t kMaxDatasetBytes = int64_t{4} << 30;

// What random numbers are for: different ones for each purpose and number.
enum class Purpose : uint32_t { kPrefix, kConversation, kAnswer, kOutputLength };

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
  if (ids.ids.empty())
    return absl::InvalidArgumentError("prompt is neither a text nor a list of token ids");
  return ids;
}

absl::StatusOr<Turn> ParseLine(const std::string& text) {
  const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return absl::InvalidArgumentError("not a JSON object");
  Turn turn;
  ASSIGN_OR_RETURN(turn.prompt, ParsePrompt(line));
  if (const auto tokens = line.find("output_tokens"); tokens != line.end()) {
    if (!tokens->is_number_unsigned() || *tokens < 1 || *tokens > kMaxTokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("output_tokens is ", tokens->dump(), ", it must be 1 to ", kMaxTokens));
    }
    turn.output_tokens = *tokens;
  }
  return turn;
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
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(path, kMaxDatasetBytes));
  std::mt19937 random = Random(seed, Purpose::kOutputLength, 0);
  std::vector<Turn> turns;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (max_requests > 0 && turns.size() == static_cast<size_t>(max_requests)) break;
    ++number;
    if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
    absl::StatusOr<Turn> turn = ParseLine(std::string(line));
    if (!turn.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": ", std::string(turn.status().message())));
    }
    if (turn->output_tokens == 0) turn->output_tokens = Draw(output, random);
    turns.push_back(*std::move(turn));
  }
  if (turns.empty() || turns.size() < static_cast<size_t>(max_requests)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", turns.size(), " requests",
                     max_requests > 0 ? absl::StrCat(", --requests is ", max_requests) : ""));
  }
  return std::make_unique<Dataset>(path, std::move(turns));
}

std::vector<uint32_t> StandInAnswer(int32_t conversation, int32_t turn, int32_t tokens,
                                    uint32_t vocab_size, uint64_t seed) {
  std::mt19937 random = Random(seed, Purpose::kAnswer, conversation, turn);
  std::vector<uint32_t> ids;
  AddIds(tokens, vocab_size, random, &ids);
  return ids;
}

}  // namespace cli

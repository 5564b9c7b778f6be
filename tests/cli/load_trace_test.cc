#include "cli/load_trace.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<uint32_t> FirstPrompt(const Trace& trace, int32_t index) {
  return trace.Get(index).turns[0].prompt.ids;
}

TEST(LoadTraceTest, EqualSeedsMakeEqualPrompts) {
  TraceShape shape = {
      .num_conversations = 4, .input = {20, 20}, .output = {3, 3}, .vocab_size = 1000, .seed = 7};
  const auto trace = MakeTrace(shape);
  const auto again = MakeTrace(shape);
  shape.seed = 8;
  const auto other = MakeTrace(shape);
  std::set<std::vector<uint32_t>> different;
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(FirstPrompt(*trace, i), FirstPrompt(*again, i));
    different.insert(FirstPrompt(*trace, i));
    different.insert(FirstPrompt(*other, i));
    EXPECT_EQ(FirstPrompt(*trace, i).size(), 20u);
    for (const uint32_t id : FirstPrompt(*trace, i)) EXPECT_LT(id, 1000u);
    EXPECT_EQ(trace->Get(i).turns[0].output_tokens, 3);
    EXPECT_EQ(trace->Get(i).shared_tokens, 0);
  }
  EXPECT_EQ(different.size(), 8u);
  EXPECT_EQ(trace->Describe(), "4 requests of 20 in, 3 out");
}

TEST(LoadTraceTest, LengthsAreDrawnFromTheirWholeRange) {
  const auto trace = MakeTrace(
      {.num_conversations = 200, .input = {5, 8}, .output = {1, 2}, .vocab_size = 9, .seed = 1});
  std::set<size_t> input;
  std::set<int32_t> output;
  for (int32_t i = 0; i < 200; ++i) {
    input.insert(FirstPrompt(*trace, i).size());
    output.insert(trace->Get(i).turns[0].output_tokens);
  }
  EXPECT_THAT(input, ElementsAre(5, 6, 7, 8));
  EXPECT_THAT(output, ElementsAre(1, 2));
}

TEST(LoadTraceTest, ConversationsOfAGroupBeginAlike) {
  const auto trace = MakeTrace({.num_conversations = 6,
                                .turns = 2,
                                .input = {4, 4},
                                .output = {2, 2},
                                .shared_prefix_tokens = 10,
                                .prefix_groups = 2,
                                .vocab_size = 50'000,
                                .seed = 3});
  const auto prefix = [&](int32_t index) {
    std::vector<uint32_t> ids = FirstPrompt(*trace, index);
    EXPECT_EQ(ids.size(), 14u);
    ids.resize(10);
    return ids;
  };
  EXPECT_EQ(prefix(0), prefix(2));
  EXPECT_EQ(prefix(1), prefix(5));
  EXPECT_NE(prefix(0), prefix(1));
  EXPECT_NE(FirstPrompt(*trace, 0), FirstPrompt(*trace, 2));
  // The first of a group finds nothing; the others find the prefix.
  for (int32_t i = 0; i < 6; ++i) EXPECT_EQ(trace->Get(i).shared_tokens, i < 2 ? 0 : 10) << i;
  EXPECT_EQ(trace->Get(0).turns[1].prompt.ids.size(), 4u);
  EXPECT_EQ(trace->num_requests(), 12);
  EXPECT_EQ(
      trace->Describe(),
      "12 requests of 4 in, 2 out in 6 conversations of 2 turns after a prefix of 10, one of 2");
}

TEST(LoadTraceTest, LengthsAreParsed) {
  EXPECT_EQ(ParseLengths("7")->Text(), "7");
  EXPECT_EQ(ParseLengths("7:9")->Text(), "7:9");
  for (const char* bad : {"", "0", "-1", "9:7", "1:2:3", "x", "5:", "99999999"}) {
    EXPECT_THAT(std::string(ParseLengths(bad).status().message()),
                HasSubstr(absl::StrCat(bad, " is no number of tokens")));
  }
}

class DatasetTest : public testing::Test {
 protected:
  ~DatasetTest() override { std::filesystem::remove(path_); }
  absl::StatusOr<std::unique_ptr<Trace>> Read(const std::string& text, int32_t max_requests = 0) {
    std::ofstream(path_) << text;
    return ReadDataset(path_, max_requests, {5, 5}, /*seed=*/1);
  }
  std::string Said(const std::string& text, int32_t max_requests = 0) {
    return std::string(Read(text, max_requests).status().message());
  }
  const std::string path_ = absl::StrCat(testing::TempDir(), "dataset.", getpid(), ".jsonl");
};

TEST_F(DatasetTest, ALineIsARequest) {
  const auto trace = Read(
      "{\"prompt\": \"text\", \"output_tokens\": 9, \"id\": 1}\n\n{\"prompt\": [1, 2]}\r\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ((*trace)->num_requests(), 3);
  const Turn text = (*trace)->Get(0).turns[0];
  EXPECT_EQ(text.prompt.text, "text");
  EXPECT_EQ(text.output_tokens, 9);
  EXPECT_THAT((*trace)->Get(1).turns[0].prompt.ids, ElementsAre(1, 2));
  EXPECT_EQ((*trace)->Get(1).turns[0].output_tokens, 5);
  EXPECT_EQ((*trace)->Get(2).turns[0].prompt.messages, "[{\"content\":\"hi\",\"role\":\"user\"}]");
  EXPECT_FALSE((*trace)->Get(0).shared_tokens.has_value());
  EXPECT_EQ((*Read("{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}", 1))->num_requests(), 1);
}

TEST_F(DatasetTest, AWrongLineIsNamed) {
  const std::string good = "{\"prompt\": \"a\"}\n";
  EXPECT_EQ(Said(good + "x"), path_ + ":2: not a JSON object");
  EXPECT_EQ(Said("{}"), path_ + ":1: needs prompt or messages, and one of them only");
  EXPECT_EQ(Said("{\"prompt\": [1, -2]}"), path_ + ":1: prompt has -2, which is no token id");
  EXPECT_EQ(Said("{\"prompt\": 5}"),
            path_ + ":1: prompt is neither a text nor a list of token ids");
  EXPECT_EQ(Said("{\"messages\": []}"), path_ + ":1: messages is not a list of messages");
  EXPECT_EQ(Said("{\"prompt\": \"a\", \"output_tokens\": 0}"),
            path_ + ":1: output_tokens is 0, it must be 1 to 16777216");
  EXPECT_EQ(Said(""), path_ + " has 0 requests");
  EXPECT_EQ(Said(good, 2), path_ + " has 1 requests, --requests is 2");
}

TEST_F(DatasetTest, EqualBlocksAreEqualTokens) {
  std::ofstream(path_)
      << "{\"input_length\": 1100, \"output_length\": 7, \"hash_ids\": [1, 2, 3]}\n"
         "{\"input_length\": 1200, \"output_length\": 8, \"hash_ids\": [1, 2, 3]}\n"
         "{\"input_length\": 1030, \"output_length\": 9, \"hash_ids\": [1, 4, 3]}\n"
         "{\"input_length\": 1536, \"output_length\": 9, \"hash_ids\": [1, 2, 3]}\n";
  const auto trace = ReadBlockTrace(path_, 0, 50'000, /*seed=*/5);
  ASSERT_TRUE(trace.ok()) << trace.status();
  std::vector<std::vector<uint32_t>> prompts;
  for (int32_t i = 0; i < 4; ++i) prompts.push_back(FirstPrompt(**trace, i));
  EXPECT_EQ(prompts[0].size(), 1100u);
  EXPECT_EQ(prompts[1].size(), 1200u);
  EXPECT_EQ((*trace)->Get(1).turns[0].output_tokens, 8);
  // What is said to be shared is the longest common beginning with an earlier prompt.
  for (int32_t i = 0; i < 4; ++i) {
    size_t longest = 0;
    for (int32_t k = 0; k < i; ++k) {
      const auto end =
          std::mismatch(prompts[i].begin(), prompts[i].end(), prompts[k].begin(), prompts[k].end());
      longest = std::max<size_t>(longest, end.first - prompts[i].begin());
    }
    EXPECT_EQ((*trace)->Get(i).shared_tokens, static_cast<int32_t>(longest)) << i;
  }
  EXPECT_EQ((*trace)->Get(1).shared_tokens, 1100);
  EXPECT_EQ((*trace)->Get(2).shared_tokens, 512);
}

TEST_F(DatasetTest, AWrongBlockTraceIsNamed) {
  const auto said = [this](const std::string& text) {
    std::ofstream(path_) << text;
    return std::string(ReadBlockTrace(path_, 0, 10, 1).status().message());
  };
  EXPECT_EQ(said("{\"input_length\": 513, \"output_length\": 1, \"hash_ids\": [1]}"),
            path_ + ":1: input_length 513 takes 2 blocks of 512, hash_ids has 1");
  EXPECT_EQ(said("{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": [\"a\"]}"),
            path_ + ":1: hash_ids has \"a\", which is no number of a block");
  EXPECT_EQ(said("{\"prompt\": \"a\"}"),
            path_ + ":1: needs input_length, output_length and the list hash_ids");
  EXPECT_EQ(said("{\"input_length\": -5}"),
            path_ + ":1: input_length is -5, it must be 1 to 16777216");
}

}  // namespace
}  // namespace cli

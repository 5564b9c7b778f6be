#include "cli/local_generation.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ferry/v1/inference.pb.h"
#include "gtest/gtest.h"
#include "model/safetensors.h"

namespace cli {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;

std::string GoldenDir() { return std::getenv("FERRY_GOLDEN_DIR"); }

struct Generated {
  absl::Status status;
  std::map<uint32_t, std::string> text;               // by branch
  std::map<uint32_t, std::vector<uint32_t>> ids;
  std::map<uint32_t, ferry::v1::FinishReason> finish;
  std::vector<ferry::v1::PositionLogprobs> logprobs;  // of all branches
  ferry::v1::GenerateSummary summary;
};

Generated Generate(const std::string& model_dir, const GenerateRequest& request) {
  engine::EngineOptions options;
  options.model_dir = model_dir;
  options.num_threads = 2;
  Generated out;
  out.status = GenerateLocally(options, request, [&](const GenerateResponse& response) {
    if (response.has_summary()) {
      out.summary = response.summary();
      return true;
    }
    out.text[response.index()] += response.text();
    for (const uint32_t id : response.token_ids()) out.ids[response.index()].push_back(id);
    for (const auto& position : response.logprobs()) out.logprobs.push_back(position);
    if (response.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
      out.finish[response.index()] = response.finish_reason();
    }
    return true;
  });
  return out;
}

template <typename T>
std::vector<T> Values(const model::Checkpoint& file, const std::string& name) {
  const model::TensorView* tensor = *file.Get(name);
  std::vector<T> values(tensor->data.size() / sizeof(T));
  std::memcpy(values.data(), tensor->data.data(), tensor->data.size());
  return values;
}

std::string Tiny() { return GoldenDir() + "/tiny_checkpoint"; }

GenerateRequest Request(const std::string& text, uint32_t max_tokens) {
  GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

class LocalGenerationGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(LocalGenerationGoldenTest, GreedyEqualsTheIndependentImplementation) {
  const std::string dir = GoldenDir() + "/models/" + GetParam();
  const auto golden = *model::Checkpoint::OpenFile(dir + "/golden.safetensors");
  int num_compared = 0;
  for (const char* length : {"p1", "p64", "p130"}) {
    const std::string name = length;
    GenerateRequest request;
    for (const int64_t id : Values<int64_t>(*golden, name + ".ids")) {
      request.mutable_tokens()->add_ids(static_cast<uint32_t>(id));
    }
    const auto greedy = Values<int64_t>(*golden, name + ".greedy");
    const auto margin = Values<float>(*golden, name + ".margin");
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_ignore_eos(true);
    request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(greedy.size()));
    const Generated generated = Generate(dir, request);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    ASSERT_EQ(generated.ids.at(0).size(), greedy.size());
    // Beyond a near tie the two may go different ways.
    for (size_t i = 0; i < greedy.size() && margin[i] > 2e-3f; ++i, ++num_compared) {
      EXPECT_EQ(generated.ids.at(0)[i], static_cast<uint32_t>(greedy[i])) << name << " token " << i;
    }
    EXPECT_EQ(generated.finish.at(0), ferry::v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(generated.summary.completion_tokens(), greedy.size());
  }
  EXPECT_GT(num_compared, 40);
}

INSTANTIATE_TEST_SUITE_P(Models, LocalGenerationGoldenTest, testing::Values("v2_group", "v3_odd"));

TEST(LocalGenerationTest, SeedAndBranchDecideTheText) {
  GenerateRequest request = Request("The ferry", 12);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(5);
  request.mutable_sampling()->set_n(3);
  const Generated first = Generate(Tiny(), request);
  ASSERT_TRUE(first.status.ok()) << first.status;
  ASSERT_EQ(first.ids.size(), 3u);
  EXPECT_NE(first.ids.at(0), first.ids.at(1));
  EXPECT_EQ(first.summary.seed(), 5u);
  EXPECT_EQ(first.summary.completion_tokens(), 36u);
  EXPECT_EQ(Generate(Tiny(), request).ids, first.ids);
  request.mutable_sampling()->set_n(1);
  EXPECT_EQ(Generate(Tiny(), request).ids.at(0), first.ids.at(0));
  request.mutable_sampling()->set_seed(6);
  EXPECT_NE(Generate(Tiny(), request).ids.at(0), first.ids.at(0));
}

TEST(LocalGenerationTest, StopStringCutsTheText) {
  const Generated whole = Generate(Tiny(), Request("The ferry", 24));
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const std::string& text = whole.text.at(0);
  ASSERT_GT(text.size(), 8u);
  // Any stretch of characters that begins inside the text.
  size_t begin = text.size() / 2;
  while ((static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) ++begin;
  size_t end = begin + 1;
  while (end < text.size() && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) ++end;
  const std::string stop = text.substr(begin, end - begin);
  GenerateRequest request = Request("The ferry", 24);
  request.mutable_sampling()->add_stop(stop);
  const Generated stopped = Generate(Tiny(), request);
  EXPECT_EQ(stopped.text.at(0), text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped.finish.at(0), ferry::v1::FINISH_REASON_STOP);
  EXPECT_LT(stopped.ids.at(0).size(), 24u);
}

TEST(LocalGenerationTest, StopIdEndsAndMinTokensBansIt) {
  const Generated whole = Generate(Tiny(), Request("The ferry", 8));
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const uint32_t stop_id = whole.ids.at(0)[3];
  GenerateRequest request = Request("The ferry", 8);
  request.mutable_sampling()->add_stop_token_ids(stop_id);
  const Generated stopped = Generate(Tiny(), request);
  EXPECT_EQ(stopped.finish.at(0), ferry::v1::FINISH_REASON_STOP);
  EXPECT_LE(stopped.ids.at(0).size(), 4u);
  EXPECT_EQ(stopped.ids.at(0).back(), stop_id);
  request.mutable_sampling()->set_min_tokens(8);
  const Generated banned = Generate(Tiny(), request);
  EXPECT_EQ(banned.ids.at(0).size(), 8u);
  EXPECT_EQ(std::count(banned.ids.at(0).begin(), banned.ids.at(0).end() - 1, stop_id), 0);
}

TEST(LocalGenerationTest, PenaltyForbidsRepetition) {
  GenerateRequest request = Request("The ferry", 40);
  request.mutable_sampling()->set_presence_penalty(2);
  request.mutable_sampling()->set_frequency_penalty(2);
  request.mutable_sampling()->set_repetition_penalty(50);
  const Generated generated = Generate(Tiny(), request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  const std::vector<uint32_t>& ids = generated.ids.at(0);
  EXPECT_EQ(std::set<uint32_t>(ids.begin(), ids.end()).size(), ids.size());
}

TEST(LocalGenerationTest, LogprobsNameTheirTokens) {
  GenerateRequest request = Request("The ferry", 4);
  request.mutable_sampling()->set_logprobs(3);
  const Generated generated = Generate(Tiny(), request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  ASSERT_EQ(generated.logprobs.size(), 4u);
  for (const auto& position : generated.logprobs) {
    ASSERT_EQ(position.top_size(), 3);
    EXPECT_EQ(position.chosen().token_id(), position.top(0).token_id());  // greedy
    EXPECT_LE(position.chosen().logprob(), 0);
    EXPECT_GE(position.top(0).logprob(), position.top(1).logprob());
    EXPECT_FALSE(position.top(2).token().empty());
  }
}

TEST(LocalGenerationTest, ErrorsAreTheRouters) {
  EXPECT_EQ(Generate(Tiny(), Request("", 4)).status.message(), "prompt text is empty");
  EXPECT_EQ(Generate(Tiny(), Request("a", 0)).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Generate(Tiny(), Request("a", 5000)).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Generate("/nowhere", Request("a", 4)).status.code(), absl::StatusCode::kNotFound);
}

TEST(LocalGenerationTest, TheCallerMayStop) {
  engine::EngineOptions options;
  options.model_dir = Tiny();
  int num_messages = 0;
  const absl::Status status = GenerateLocally(options, Request("a", 100), [&](const GenerateResponse&) {
    return ++num_messages < 3;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(num_messages, 3);
}

}  // namespace
}  // namespace cli

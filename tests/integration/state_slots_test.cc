// A model that keeps a state per sequence through both workers over a real UCX link: the text of a
// request is that of the request alone, whichever way its state came.

#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"
#include "tests/integration/worker_pair.h"

namespace integration {
namespace {

constexpr int32_t kBlockSize = 128;

PairOptions Options() {
  PairOptions options;
  options.network.block_size = kBlockSize;
  options.network.limits.max_tokens = 512;
  options.network.limits.max_seqs = 16;
  return options;
}

std::vector<int32_t> Tokens(int32_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 97);
  return tokens;
}

PairRequest Request(const std::string& id, std::vector<int32_t> tokens, int32_t max_tokens) {
  PairRequest request;
  request.id = id;
  request.tokens = std::move(tokens);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  return request;
}

PairReply ExpectReference(WorkerPair& pair, const PairRequest& request) {
  PairReply reply = pair.Generate(request);
  EXPECT_TRUE(reply.status.ok()) << request.id << ": " << reply.status;
  for (uint32_t branch = 0; branch < request.num_branches; ++branch) {
    EXPECT_EQ(reply.tokens[branch], pair.Reference(request, static_cast<int32_t>(branch)))
        << request.id << " branch " << branch;
  }
  return reply;
}

class StateSlotsTest : public testing::TestWithParam<const char*> {};

TEST_P(StateSlotsTest, TransferredIsLocalForEveryLength) {
  PairOptions options = Options();
  options.links = GetParam();
  WorkerPair pair(options);
  for (const int32_t length : {1, 127, 128, 129, 255, 256, 257, 384, 500}) {
    PairRequest request = Request(absl::StrCat("pushed", length), Tokens(length, length), 60);
    const PairReply pushed = ExpectReference(pair, request);
    EXPECT_THAT(pushed.prefilled.transport(), testing::HasSubstr(GetParam()));
    const auto sent = pushed.prefilled.kv_bytes();
    EXPECT_EQ(sent, pushed.prefilled.kv_blocks() * pair.decode().runtime().block_bytes() +
                        options.network.state_slot_bytes);
    EXPECT_EQ(pushed.decoded.kv_bytes_received(), sent);
    request.id = absl::StrCat("local", length);
    request.local = true;
    const PairReply local = ExpectReference(pair, request);
    EXPECT_EQ(local.tokens, pushed.tokens);
  }
  EXPECT_TRUE(pair.WaitIdle());
}
INSTANTIATE_TEST_SUITE_P(Links, StateSlotsTest, testing::Values("shm", "tcp"));

TEST(StateSlotsPairTest, AConversationMovesBetweenBothWorkers) {
  WorkerPair pair(Options());
  std::vector<int32_t> history = Tokens(300, 1);
  int32_t written_at_decode = 0;
  for (int turn = 0; turn < 6; ++turn) {
    PairRequest request = Request(absl::StrCat("turn", turn), history, 90);
    request.local = turn % 2 == 1;
    const auto prompt = static_cast<int32_t>(history.size());
    const PairReply reply = ExpectReference(pair, request);
    if (request.local) {
      // The decode worker has its own decoded turns' newest boundary.
      EXPECT_EQ(reply.decoded.cached_tokens(), written_at_decode / kBlockSize * kBlockSize);
    } else if (turn > 0) {
      // The prefill worker goes on behind its own last boundary, and sends only what is missing.
      EXPECT_GT(reply.prefilled.cached_tokens(), 0u);
      EXPECT_GT(reply.decoded.cached_tokens(), 0u);
    }
    history.insert(history.end(), reply.tokens[0].begin(), reply.tokens[0].end());
    written_at_decode = prompt + 90 - 1;
    history.push_back(turn);
  }
  EXPECT_TRUE(pair.WaitIdle());
}

TEST(StateSlotsPairTest, UsefulBytesAndPaddingAreToldByGroupAndAddUp) {
  const PairOptions options = Options();
  WorkerPair pair(options);
  const PairReply reply = ExpectReference(pair, Request("r", Tokens(300, 2), 5));
  ASSERT_EQ(reply.prefilled.groups_size(), 4);
  const std::vector<std::pair<std::string, uint64_t>> useful = {
      {"each", 300 * 2 * 24},  // two layers, 24 bytes a token
      {"four", 75 * 3 * 40},   // three layers, 40 bytes for four tokens
      {"many", 4 * 72},        // one layer, 72 bytes for 64 tokens; the fifth is unfinished
      {"state", static_cast<uint64_t>(options.network.state_slot_bytes)}};
  uint64_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(reply.prefilled.groups(i).name(), useful[i].first);
    EXPECT_EQ(reply.prefilled.groups(i).useful_bytes(), useful[i].second);
    sum += reply.prefilled.groups(i).useful_bytes() + reply.prefilled.groups(i).padding_bytes();
  }
  EXPECT_EQ(sum, reply.prefilled.kv_bytes());
  EXPECT_EQ(reply.prefilled.groups(3).padding_bytes(), 0u);
  const std::string metrics =
      prometheus::TextSerializer().Serialize(pair.prefill().registry().Collect());
  EXPECT_THAT(metrics,
              testing::HasSubstr(
                  "ferry_transfer_group_bytes_total{group=\"each\",kind=\"useful\"} 14400\n"));
  EXPECT_THAT(metrics, testing::HasSubstr("ferry_state_slots{state=\"free\"}"));
  EXPECT_THAT(metrics, testing::HasSubstr("ferry_state_snapshots_total{event=\"taken\"} 1\n"));
}

// Sixty requests that share prefixes, eight at a time, some prefilled at the decode worker.
void ExpectManyAtOnce(const PairOptions& options) {
  WorkerPair pair(options);
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::vector<int32_t> shared = Tokens(700, 9);
  std::vector<PairRequest> requests;
  for (int i = 0; i < 60; ++i) {
    const auto max_tokens = static_cast<int32_t>(1 + random() % 150);
    const auto length = static_cast<int32_t>(1 + random() % (700 - max_tokens));
    std::vector<int32_t> tokens(shared.begin(), shared.begin() + length);
    for (auto t = static_cast<int32_t>(random() % (2 * length)); t < length; ++t) {
      tokens[t] = static_cast<int32_t>(random() % 97);
    }
    PairRequest request = Request(absl::StrCat("r", i), std::move(tokens), max_tokens);
    request.local = random() % 3 == 0;
    request.num_branches = random() % 4 == 0 ? 2 : 1;
    request.sampling.temperature = static_cast<float>(random() % 2);
    request.sampling.seed = random();
    requests.push_back(std::move(request));
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&] {
      for (size_t i = next++; i < requests.size(); i = next++) ExpectReference(pair, requests[i]);
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(pair.WaitIdle());
}

// Over few slots everything is delayed, nothing fails, nothing is mixed up.
TEST(StateSlotsPairTest, ManyAtOnceOverFewSlotsGiveTheirOwnText) {
  for (const int32_t slots : {2, 5, 20}) {
    SCOPED_TRACE(testing::Message() << slots << " slots");
    PairOptions options = Options();
    options.num_state_slots = slots;
    options.num_blocks = 30;
    ExpectManyAtOnce(options);
  }
}

// What a step has written on the device is sent from there, and what is received is there before it
// is read; without a state, blocks alone.
TEST(StateSlotsPairTest, ACacheInTheDevicesOwnMemoryTravels) {
  for (const int64_t state_slot_bytes : {0, 1024}) {
    SCOPED_TRACE(testing::Message() << state_slot_bytes << " bytes of state");
    PairOptions options = Options();
    options.network.state_slot_bytes = state_slot_bytes;
    if (state_slot_bytes == 0) options.num_state_slots = 0;
    options.num_blocks = 30;
    options.device_memory = true;
    ExpectManyAtOnce(options);
  }
}

TEST(StateSlotsPairTest, TheWayOfACacheIsTold) {
  for (const bool device : {false, true}) {
    PairOptions options = Options();
    options.device_memory = device;
    WorkerPair pair(options);
    EXPECT_EQ(pair.prefill().runtime().cache_path, device ? "staged" : "host");
    const std::string path = device ? "shared" : "host";  // both are on this host
    const PairReply reply = ExpectReference(pair, Request("r", Tokens(300, 2), 5));
    EXPECT_EQ(absl::EndsWith(reply.prefilled.transport(), "+shared"), device);
    EXPECT_THAT(prometheus::TextSerializer().Serialize(pair.prefill().registry().Collect()),
                testing::HasSubstr(absl::StrCat(
                    "ferry_transfer_link_bytes_total{link=\"shm\",path=\"", path, "\"}")));
  }
}

TEST(StateSlotsPairTest, ALargeSlotTravelsInParts) {
  PairOptions options = Options();
  options.network.state_slot_bytes = (int64_t{20} << 20) + 8;  // three messages
  options.num_state_slots = 3;
  WorkerPair pair(options);
  ExpectReference(pair, Request("pushed", Tokens(200, 3), 20));
  PairRequest again = Request("local", Tokens(200, 3), 20);
  again.local = true;
  ExpectReference(pair, again);
  EXPECT_TRUE(pair.WaitIdle());
}

}  // namespace
}  // namespace integration

// Sparse models (V3.2; V4 with its state) through a router, prefill and decode workers over UCX,
// all real processes, from golden checkpoints: the text is that of a single engine.

#include <cstdlib>
#include <filesystem>
#include <future>

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "model/safetensors.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);  // a failure, not a wait

// A golden checkpoint and, as it comes without one, the tokenizer of the tiny one.
std::string ServedCheckpoint(const std::string& name) {
  namespace fs = std::filesystem;
  const fs::path golden = std::getenv("FERRY_GOLDEN_DIR");
  const fs::path dir = fs::path(MakeTestDir()) / name;
  fs::create_directory(dir);
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::create_symlink(golden / "models" / name / file, dir / file);
  }
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
    fs::create_symlink(golden / "tiny_checkpoint" / file, dir / file);
  }
  return dir;
}

class SparseServingTest : public testing::TestWithParam<const char*> {
 protected:
  SparseServingTest() : model_dir_(ServedCheckpoint(GetParam())), oracle_(model_dir_) {}

  const model::CacheSpec& spec() const { return oracle_.engine().cache_layout().spec(); }
  int64_t block_bytes() const { return oracle_.engine().cache_layout().block_bytes(); }
  bool keeps_state() const { return spec().state_slot_bytes > 0; }

  std::vector<int32_t> Prompt(int32_t length, uint32_t salt) const {
    return MakePrompt(length, salt, oracle_.engine().network().config().vocab_size);
  }
  // The first `shared` tokens of one prompt, then others.
  std::vector<int32_t> Sharing(const std::vector<int32_t>& prompt, int32_t shared, int32_t length,
                               uint32_t salt) const {
    std::vector<int32_t> tokens = Prompt(length, salt);
    std::copy_n(prompt.begin(), shared, tokens.begin());
    if (tokens[shared] == prompt[shared]) tokens[shared] ^= 1;
    return tokens;
  }
  // Every prompt crosses; of V4 a snapshot every two blocks.
  SystemOptions Options(std::vector<std::string> worker_flags = {}) const {
    SystemOptions options;
    options.model_dir = model_dir_;
    options.router_flags = {"--local_prefill_tokens", "0"};
    worker_flags.insert(worker_flags.end(), {"--num_threads", "1", "--num_blocks", "200"});
    if (keeps_state()) {
      worker_flags.insert(worker_flags.end(),
                          {"--num_state_slots", "40", "--snapshot_blocks", "2"});
    }
    options.prefill_flags = options.decode_flags = worker_flags;
    return options;
  }
  void ExpectRight(const absl::StatusOr<ferry::Client::Completion>& completion, const Ask& ask) {
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), Expected(oracle_, ask));
  }
  ferry::v1::GenerateSummary CompleteRight(FerrySystem& system, const Ask& ask) {
    const auto completion = system.client().Complete(ToRequest(ask));
    ExpectRight(completion, ask);
    return completion.ok() ? completion->summary : ferry::v1::GenerateSummary();
  }

  const std::string model_dir_;
  SingleEngine oracle_;
};

INSTANTIATE_TEST_SUITE_P(Models, SparseServingTest,
                         testing::Values("v32_native", "v4_native", "v4_odd"),
                         [](const auto& param_info) { return std::string(param_info.param); });

// The independent implementation's greedy tokens, wherever its margin is above twice the error that
// the fixtures allow a logit.
TEST_P(SparseServingTest, TheTextIsTheGoldenOne) {
  const auto file = model::Checkpoint::OpenFile(
      absl::StrCat(std::getenv("FERRY_GOLDEN_DIR"), "/models/", GetParam(), "/golden.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto values = [&](const std::string& name) { return (*(*file)->Get(name))->data.data(); };
  const auto system = FerrySystem::Start(Options());
  int certain = 0;
  for (const int32_t length : {1, 5, 64, 130, 300, 700}) {
    SCOPED_TRACE(length);
    const std::string name = absl::StrCat("p", length);
    const auto* ids = reinterpret_cast<const int64_t*>(values(name + ".ids"));
    const auto* greedy = reinterpret_cast<const int64_t*>(values(name + ".greedy"));
    const auto* margin = reinterpret_cast<const float*>(values(name + ".margin"));
    const auto completion =
        system->client().Complete(ToRequest({{ids, ids + length}, /*max_tokens=*/24, 0}));
    ASSERT_TRUE(completion.ok()) << completion.status();
    const std::vector<int32_t> tokens = Tokens(*completion);
    ASSERT_EQ(tokens.size(), 24u);
    for (int i = 0; i < 24 && margin[i] > 2e-3f; ++i, ++certain)
      EXPECT_EQ(tokens[i], greedy[i]) << i;
  }
  EXPECT_GT(certain, 70) << "most of the 144 tokens are beyond doubt";
}

// Transfers at the borders of windows and blocks, beside them, and in the middle of a CSA window
// (130, 301), of an HCA window (all but multiples of 128) and of neither; 20 more tokens go on
// there.
TEST_P(SparseServingTest, TheTextIsThatOfASingleEngineWhereverThePromptEnds) {
  const auto system = FerrySystem::Start(Options());
  for (const int32_t length : {1, 3, 4, 63, 127, 128, 129, 130, 255, 256, 257, 301, 700}) {
    for (const uint64_t seed : {0, 7}) {
      SCOPED_TRACE(testing::Message() << "length " << length << " seed " << seed);
      const auto summary =
          CompleteRight(*system, {Prompt(length, length + seed), /*max_tokens=*/20, seed});
      EXPECT_EQ(summary.prefill_worker(), system->prefill(0).address);
      EXPECT_EQ(summary.decode_worker(), system->decode(0).address);
      EXPECT_EQ(summary.kv_blocks(), (length + spec().block_size - 1) / spec().block_size);
      EXPECT_EQ(summary.kv_bytes(), summary.kv_blocks() * block_bytes() + spec().state_slot_bytes);
    }
  }
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

// Decoding over a border of CSA and HCA windows (127 to 129) and of a block (255 to 257), from a
// transfer before it.
TEST_P(SparseServingTest, DecodingCrossesEveryBorder) {
  const auto system = FerrySystem::Start(Options());
  CompleteRight(*system, {Prompt(120, 1), /*max_tokens=*/150, 0});
  CompleteRight(*system, {Prompt(122, 2), /*max_tokens=*/150, 3});
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

TEST_P(SparseServingTest, ASharedPrefixIsReusedUpToWhereAPromptCanGoOn) {
  const auto system = FerrySystem::Start(Options());
  const std::vector<int32_t> first = Prompt(1400, 1);
  CompleteRight(*system, {first, 4, 0});
  // V4, blocks of 256: snapshots behind blocks 2 and 4, and 5 (the last before token 1400).  V3.2
  // goes on behind any block of 64.
  const struct {
    int32_t shared, v4, v32;
  } cases[] = {{1399, 1280, 1344},                      // the last boundary
               {1100, 1024, 1088}, {1024, 1024, 1024},  // at and just behind a snapshot
               {900, 512, 896},    {520, 512, 512},     // between snapshots
               {300, 0, 256},      {100, 0, 64}};       // before the first
  uint32_t salt = 10;
  for (const auto& one : cases) {
    SCOPED_TRACE(one.shared);
    const Ask ask = {Sharing(first, one.shared, one.shared + 30, ++salt), 12, salt % 2};
    const auto summary = CompleteRight(*system, ask);
    EXPECT_EQ(summary.cached_tokens(), keeps_state() ? one.v4 : one.v32);
    // The decode worker lacks the blocks that are not shared; the state always comes whole.
    const int32_t blocks = (one.shared + 30 + spec().block_size - 1) / spec().block_size -
                           one.shared / spec().block_size;
    EXPECT_EQ(summary.kv_blocks(), blocks);
    EXPECT_EQ(summary.kv_bytes(), blocks * block_bytes() + spec().state_slot_bytes);
  }
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

TEST_P(SparseServingTest, AFollowUpTurnIsServedFromTheDecodeWorkersOwnBlocks) {
  SystemOptions options = Options();
  options.router_flags.clear();
  const auto system = FerrySystem::Start(options);
  const Ask first = {Prompt(500, 5), 100, 0};
  const auto answer = system->client().Complete(ToRequest(first));
  ExpectRight(answer, first);
  ASSERT_TRUE(answer.ok());
  Ask turn = {first.prompt, 20, 0};
  for (const std::vector<int32_t>& more : {Tokens(*answer), Prompt(15, 6)}) {
    turn.prompt.insert(turn.prompt.end(), more.begin(), more.end());
  }
  const auto summary = CompleteRight(*system, turn);
  EXPECT_EQ(summary.prefill_worker(), summary.decode_worker());
  EXPECT_EQ(summary.kv_bytes(), 0);
  // 599 tokens are in whole blocks up to here, and V4 keeps the state of the newest boundary.
  EXPECT_EQ(summary.cached_tokens(), 599 / spec().block_size * spec().block_size);
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

TEST_P(SparseServingTest, PromptsThatShareAPrefixGoToTheWorkerThatCanGoOnFromIt) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  // No report of a worker's load falls into a request and speaks against it when that is over.
  options.router_flags.push_back("--heartbeat_s=60");
  const auto system = FerrySystem::Start(options);
  for (uint32_t family = 0; family < 3; ++family) {
    const std::vector<int32_t> first = Prompt(700, 100 + family);
    const std::string worker = CompleteRight(*system, {first, 4, 0}).prefill_worker();
    for (uint32_t i = 1; i < 3; ++i) {
      const auto summary = CompleteRight(*system, {Sharing(first, 600, 640, i), 4, 0});
      EXPECT_EQ(summary.prefill_worker(), worker) << "family " << family << " request " << i;
      EXPECT_GE(summary.cached_tokens(), 512);
    }
  }
}

// Decodes and chunks in one batch, branches of n > 1, blocks and slots for a few at a time:
// everything is delayed, nothing fails, and each gets its own text.
TEST_P(SparseServingTest, ManyAtOnceOverSmallPoolsGiveTheirOwnText) {
  SystemOptions options = Options();
  options.decode_flags = {"--num_threads", "1", "--num_blocks",
                          absl::StrCat(2048 / spec().block_size)};
  if (keeps_state())
    options.decode_flags.insert(options.decode_flags.end(), {"--num_state_slots", "5"});
  // Prompts below this are computed by the decode worker, beside its decodes.
  options.router_flags = {"--local_prefill_tokens", "150"};
  const auto system = FerrySystem::Start(options);
  const auto client = system->NewClient(20 * kPatience);
  std::vector<std::future<std::string>> problems;
  for (uint32_t i = 0; i < 16; ++i) {
    const Ask ask = {Prompt(static_cast<int32_t>(20 + 37 * i), 200 + i),
                     static_cast<int32_t>(20 + 7 * (i % 5)), i % 3};
    const uint32_t branches = i % 4 == 1 ? 2 : 1;
    std::vector<std::vector<int32_t>> expected;  // by branch
    for (uint32_t branch = 0; branch < branches; ++branch) {
      expected.push_back(Expected(oracle_, ask, branch));
    }
    ferry::v1::GenerateRequest request = ToRequest(ask);
    request.mutable_sampling()->set_n(branches);
    problems.push_back(
        std::async(std::launch::async, [&client, request, want = std::move(expected)] {
          std::vector<std::vector<int32_t>> got(want.size());
          const absl::Status status = client->Generate(request, [&](const auto& message) {
            for (const uint32_t id : message.token_ids()) {
              got.at(message.index()).push_back(static_cast<int32_t>(id));
            }
            return true;
          });
          return !status.ok() ? status.ToString() : got == want ? "" : "another text";
        }));
  }
  for (size_t i = 0; i < problems.size(); ++i) EXPECT_EQ(problems[i].get(), "") << i;
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

// A worker of two that is in the middle of prompts is killed: every request is answered all the
// same, and nothing stays behind.
TEST_P(SparseServingTest, AKilledPrefillWorkerLosesNothing) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  options.prefill_flags.insert(options.prefill_flags.end(), {"--chunk_tokens", "32"});
  const auto system = FerrySystem::Start(options);
  std::vector<Ask> asks;
  std::vector<std::future<absl::StatusOr<ferry::Client::Completion>>> answers;
  const auto client = system->NewClient(20 * kPatience);
  for (uint32_t i = 0; i < 8; ++i) {
    asks.push_back({Prompt(800, 40 + i), 8, i % 2});
    answers.push_back(std::async(std::launch::async, [&client, ask = asks.back()] {
      return client->Complete(ToRequest(ask));
    }));
  }
  WorkerProcess& victim = system->prefill(0);
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      victim,
      [](const ferry::v1::LoadReport& load) {
        return load.running_requests() > 0 && load.waiting_tokens() > 800;
      },
      kPatience));
  system->ExpectDead(victim.process);
  victim.process.Kill();
  uint32_t retried = 0;
  for (size_t i = 0; i < asks.size(); ++i) {
    SCOPED_TRACE(i);
    const auto completion = answers[i].get();
    ExpectRight(completion, asks[i]);
    if (completion.ok()) retried += completion->summary.attempts() > 1;
  }
  EXPECT_GT(retried, 0u);
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
}

TEST_P(SparseServingTest, ACancelledRequestFreesBlocksAndStateOnBothSides) {
  SystemOptions options = Options();
  options.prefill_flags.insert(options.prefill_flags.end(), {"--chunk_tokens", "16"});
  const auto system = FerrySystem::Start(options);
  const auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(system->router_address(), grpc::InsecureChannelCredentials()));
  // In mid-prefill, when the decode worker has reserved.
  {
    grpc::ClientContext context;
    auto stream = stub->Generate(&context, ToRequest({Prompt(1900, 4), 8, 0}));
    ASSERT_TRUE(FerrySystem::WaitForLoad(
        system->decode(0),
        [&](const ferry::v1::LoadReport& load) {
          return load.kv_blocks().reserved() > 0 &&
                 (!keeps_state() || load.state_slots().reserved() > 0);
        },
        kPatience));
    context.TryCancel();
    ferry::v1::GenerateResponse message;
    while (stream->Read(&message)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
  // While decoding: the client walks away after three messages.
  int messages = 0;
  const absl::Status status = system->client().Generate(
      ToRequest({Prompt(500, 5), 1000, 0}), [&](const auto&) { return ++messages < 3; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_EQ(system->WaitUntilIdle(kPatience), "");
  CompleteRight(*system, {Prompt(300, 7), 8, 0});
}

// What has crossed, group by group, in the prefill worker's metrics.
TEST_P(SparseServingTest, GroupsSayWhatCrossed) {
  const auto system = FerrySystem::Start(Options({"--kv_cache_dtype", "fp8"}));
  constexpr int32_t kTokens = 1000;
  ASSERT_TRUE(system->client().Complete(ToRequest({Prompt(kTokens, 3), 2, 0})).ok());
  ASSERT_EQ(system->WaitUntilIdle(kPatience), "");
  const std::string metrics = ReadMetrics(system->prefill(0).metrics_port);
  const auto bytes = [&](const std::string& group, const char* kind) {
    return SumOf(metrics, absl::StrCat("ferry_transfer_group_bytes_total{group=\"", group,
                                       "\",kind=\"", kind, "\"}"))
        .value_or(-1);
  };
  const std::string model = GetParam();
  if (model == "v32_native") {  // three layers
    EXPECT_EQ(bytes("latent", "useful"), kTokens * 3 * 656);
    EXPECT_EQ(bytes("index_key", "useful"), kTokens * 3 * 132);
    EXPECT_EQ(bytes("latent", "padding"), 24 * 3 * 656);
  } else if (model == "v4_native") {  // two layers of 4, one of 128, four windows; four blocks
    EXPECT_EQ(bytes("csa", "useful"), kTokens / 4 * 2 * 584);
    EXPECT_EQ(bytes("csa", "padding"), 2 * (6 * 584 + 4 * 256));
    EXPECT_EQ(bytes("hca", "useful"), 7 * 584);
    EXPECT_EQ(bytes("hca", "padding"), 584 + 4 * 624);
    EXPECT_EQ(bytes("csa_index_key", "useful"), kTokens / 4 * 2 * 132);
    EXPECT_EQ(bytes("state", "useful"), 4 * 128 * 584 + 2 * 6 * 640 * 4 + 3 * 512 * 4);
  }
  EXPECT_EQ(bytes("state", "padding"), keeps_state() ? 0 : -1);
}

}  // namespace
}  // namespace integration

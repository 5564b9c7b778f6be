// OpenAI's API of a router process: its flags, its end, and a thousand streams at once.

#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"
#include "service/startup.h"
#include "tests/fakes/fake_worker.h"
#include "tests/fakes/program.h"
#include "tests/router/http/http_client.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using testing::HasSubstr;

constexpr int kStreams = 1000;
constexpr char kAsk[] = R"({"prompt": "hello there", "max_tokens": 10, "stream": true})";

// Resident memory in bytes.
int64_t MemoryOf(int pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  int64_t kib = 0;
  while (status >> word && word != "VmRSS:") {
  }
  status >> kib;
  EXPECT_GT(kib, 0) << "process " << pid;
  return kib * 1024;
}

class HttpProcessTest : public testing::Test {
 protected:
  HttpProcessTest() {
    assets_.Write("config.json", R"({"vocab_size": 300, "max_position_embeddings": 4096})");
    assets_.Write("tokenizer.json", tokenizer::TinyTokenizer().dump());
    // Every request gets one token and waits for the test.
    worker_.on_decode = [this](std::shared_ptr<fakes::DecodeCall> call) {
      call->Accept();
      call->Tokens(0, "a");
      const std::lock_guard lock(mutex_);
      calls_.push_back(std::move(call));
    };
  }

  ~HttpProcessTest() override {
    const std::lock_guard lock(mutex_);
    calls_.clear();  // they belong to the worker, which goes first
  }

  std::vector<std::string> Flags(const std::vector<std::string>& more = {},
                                 const std::string& http_listen = "127.0.0.1:0") {
    std::vector<std::string> flags = {
        "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--http_listen=" + http_listen,
        "--model_assets=m=" + assets_.path(), "--workers=" + worker_.address()};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  // The HTTP port, when requests can be served; -1 if it ends before.
  static int PortOf(fakes::Program& process) {
    return process.ReadUntil(" http_port=") && process.ReadUntil("process=ferry-router ready\n")
               ? process.Number(" http_port=")
               : -1;
  }
  std::string Refusal(const std::vector<std::string>& flags) {
    fakes::Program process("ferry-router", flags);
    EXPECT_EQ(process.Wait(), 1) << process.said();
    const size_t last_line = process.said().rfind('\n', process.said().size() - 2);
    return process.said().substr(last_line == std::string::npos ? 0 : last_line + 1);
  }
  bool WaitForCalls(size_t count) {
    return worker_.WaitFor([&] {
      const std::lock_guard lock(mutex_);
      return calls_.size() == count;
    });
  }

  const tokenizer::TempDir assets_;
  fakes::FakeWorker::Directory directory_;
  std::mutex mutex_;  // guards calls_
  std::vector<std::shared_ptr<fakes::DecodeCall>> calls_;
  fakes::FakeWorker worker_{{.role = ferry::v1::WORKER_ROLE_BOTH, .num_blocks = 100000},
                            &directory_};
};

TEST_F(HttpProcessTest, WrongFlagsAreOneSentence) {
  EXPECT_THAT(Refusal(Flags({"--chat_format=v9"})),
              HasSubstr("ferry-router: --chat_format v9: chat format \"v9\" is none of"));
  EXPECT_THAT(Refusal(Flags({"--chat_format=other=v3"})),
              HasSubstr("--chat_format other=v3: no model of that name is served"));
  EXPECT_THAT(Refusal(Flags({"--chat_format=m=v3"})), HasSubstr("--chat_format m=v3: "));
  EXPECT_THAT(Refusal(Flags({"--api_keys_file=/nowhere/keys"})), HasSubstr("/nowhere/keys"));
  const auto listening = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(listening.ok());
  const std::string taken = absl::StrCat("127.0.0.1:", (*listening)->port());
  EXPECT_THAT(Refusal(Flags({}, taken)), HasSubstr("cannot listen on " + taken));
}

TEST_F(HttpProcessTest, SigtermLetsStreamsFinish) {
  fakes::Program process("ferry-router", Flags());
  const int port = PortOf(process);
  HttpClient client(port);
  client.Ask("/v1/completions", kAsk);
  client.ReadUntil("\"a\"");
  HttpClient idle(port);
  idle.Ask("/health");
  EXPECT_EQ(idle.Read().status, 200);
  process.Signal(SIGTERM);
  ASSERT_TRUE(process.ReadUntil("draining signal="));
  EXPECT_TRUE(idle.AtEnd());  // its next request goes elsewhere
  ASSERT_TRUE(WaitForCalls(1));
  calls_[0]->Answer("b");
  EXPECT_TRUE(client.Read().done());
  EXPECT_EQ(process.Wait(), 0) << process.said();
}

TEST_F(HttpProcessTest, TheDrainLimitEndsStreamsWithAnError) {
  fakes::Program process("ferry-router", Flags({"--drain_limit_s=0.1"}));
  const int port = PortOf(process);
  HttpClient client(port);
  client.Ask("/v1/completions", kAsk);
  client.ReadUntil("\"a\"");
  process.Signal(SIGTERM);
  const Reply reply = client.Read();
  EXPECT_FALSE(reply.done());
  EXPECT_THAT(reply.body, HasSubstr("the router is shutting down"));
  EXPECT_TRUE(client.AtEnd());
  EXPECT_EQ(process.Wait(), 0) << process.said();
}

// Prints what a stream costs the router.
TEST_F(HttpProcessTest, AThousandStreamsAtOnce) {
  ASSERT_EQ(service::RaiseOpenFileLimit(), absl::OkStatus());
  fakes::Program process("ferry-router", Flags());
  const int port = PortOf(process);

  std::thread log([&] { process.ReadUntil("process=ferry-router stopped"); });  // or it fills up

  std::vector<HttpClient> clients;
  int64_t before = 0;
  for (int i = 0; i < kStreams; ++i) {
    clients.emplace_back(port).Ask("/v1/completions", kAsk);
    if (i + 1 != kStreams / 10) continue;
    // What the process needs once is there now.
    for (HttpClient& client : clients) client.ReadUntil("\"a\"");
    before = MemoryOf(process.pid());
  }
  for (HttpClient& client : clients) {
    EXPECT_EQ(client.ReadUntil("\"a\"").status, 200);
  }
  const int64_t per_stream = (MemoryOf(process.pid()) - before) / (kStreams - kStreams / 10);
  std::printf("%d streams: %lld bytes of the router's memory each\n", kStreams,
              static_cast<long long>(per_stream));
  EXPECT_LT(per_stream, 256 << 10);
  EXPECT_TRUE(WaitForCalls(kStreams));
  for (const auto& call : calls_) call->Answer("b");
  for (HttpClient& client : clients) {
    const Reply reply = client.Read();
    EXPECT_TRUE(reply.done()) << reply.body;
  }
  process.Signal(SIGTERM);
  log.join();
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace router::http

// Bad input of every kind gets one clear error that names the thing and the values; nothing is
// lost.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

using ::testing::HasSubstr;

std::string DemoModel() { return std::getenv("FERRY_DEMO_MODEL"); }

struct BadRequest {
  std::string name;
  std::function<void(ferry::v1::GenerateRequest&)> spoil;
  absl::StatusCode code;
  std::string sentence;  // a part of it
};

TEST(BadInputTest, EveryBadRequestHasItsStatusAndSentence) {
  SystemOptions options;
  options.model_dir = DemoModel();
  const auto system = FerrySystem::Start(options);
  const absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  using Request = ferry::v1::GenerateRequest;
  const std::vector<BadRequest> table = {
      {"over-long prompt",
       [](Request& r) {
         r.clear_prompt();
         for (int i = 0; i < 1100; ++i) r.mutable_tokens()->add_ids(20);
       },
       kInvalid, "1100"},
      {"prompt and max_tokens beyond the context",
       [](Request& r) { r.mutable_sampling()->set_max_tokens(5000); }, kInvalid, "5000"},
      {"empty text", [](Request& r) { r.set_text(""); }, kInvalid, "empty"},
      {"no prompt", [](Request& r) { r.clear_prompt(); }, kInvalid, "prompt"},
      {"empty token list",
       [](Request& r) {
         r.clear_prompt();
         r.mutable_tokens();
       },
       kInvalid, "empty"},
      {"invalid UTF-8", [](Request& r) { r.set_text("ab\xff\xfe"); }, kInvalid, "UTF-8"},
      {"unknown model", [](Request& r) { r.set_model("gpt-2"); }, absl::StatusCode::kNotFound,
       "gpt-2"},
      {"temperature -1", [](Request& r) { r.mutable_sampling()->set_temperature(-1); }, kInvalid,
       "temperature"},
      {"temperature NaN",
       [](Request& r) {
         r.mutable_sampling()->set_temperature(std::numeric_limits<float>::quiet_NaN());
       },
       kInvalid, "temperature"},
      {"top_p 0", [](Request& r) { r.mutable_sampling()->set_top_p(0); }, kInvalid, "top_p"},
      {"top_p 1.5", [](Request& r) { r.mutable_sampling()->set_top_p(1.5f); }, kInvalid, "top_p"},
      {"min_p 2", [](Request& r) { r.mutable_sampling()->set_min_p(2); }, kInvalid, "min_p"},
      {"top_k -7", [](Request& r) { r.mutable_sampling()->set_top_k(-7); }, kInvalid, "top_k"},
      {"repetition_penalty 0", [](Request& r) { r.mutable_sampling()->set_repetition_penalty(0); },
       kInvalid, "repetition_penalty"},
      {"presence_penalty 3", [](Request& r) { r.mutable_sampling()->set_presence_penalty(3); },
       kInvalid, "presence_penalty"},
      {"max_tokens 0", [](Request& r) { r.mutable_sampling()->set_max_tokens(0); }, kInvalid,
       "max_tokens"},
      {"token id out of range",
       [](Request& r) {
         r.clear_prompt();
         r.mutable_tokens()->add_ids(4096);
       },
       kInvalid, "4096"},
      {"too many stops",
       [](Request& r) {
         for (int i = 0; i < 17; ++i) r.mutable_sampling()->add_stop(std::string(3, 'x'));
       },
       kInvalid, "stop"},
      {"empty stop", [](Request& r) { r.mutable_sampling()->add_stop(std::string()); }, kInvalid,
       "stop"},
      {"n 0", [](Request& r) { r.mutable_sampling()->set_n(0); }, kInvalid, "n "},
      {"n 17", [](Request& r) { r.mutable_sampling()->set_n(17); }, kInvalid, "17"},
      {"logprobs 21", [](Request& r) { r.mutable_sampling()->set_logprobs(21); }, kInvalid, "21"},
      {"request id with a space", [](Request& r) { r.set_request_id("a\nb"); }, kInvalid,
       "request_id"},
      {"message over the limit", [](Request& r) { r.set_text(std::string(65 << 20, 'a')); },
       absl::StatusCode::kResourceExhausted, "larger than max"},
  };
  for (const BadRequest& bad : table) {
    SCOPED_TRACE(bad.name);
    ferry::v1::GenerateRequest request;
    request.set_text("hello");
    request.mutable_sampling()->set_max_tokens(4);
    bad.spoil(request);
    const absl::Status status = system->client().Complete(request).status();
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.sentence));
  }
  // Nothing was lost: the system still answers, and holds nothing.
  ferry::v1::GenerateRequest good;
  good.set_text("hello");
  good.mutable_sampling()->set_max_tokens(4);
  EXPECT_TRUE(system->client().Complete(good).ok());
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(10)), "");
}

struct BadStart {
  std::string name;
  std::vector<std::string> argv;  // argv[0] without its folder
  std::vector<std::string> sentence;
};

TEST(BadInputTest, AProcessThatCannotStartSaysWhyInOneSentence) {
  SystemOptions options;
  options.model_dir = DemoModel();
  const auto system = FerrySystem::Start(options);
  const std::string bin = std::getenv("FERRY_BIN_DIR");
  const std::string dir = MakeTestDir();
  const std::vector<BadStart> table = {
      {"wrong checkpoint", {"ferry-prefill", "--model", "/no/such/dir"}, {"/no/such/dir"}},
      {"wrong checkpoint", {"ferry-decode", "--model", dir}, {dir, "config.json"}},
      {"wrong assets",
       {"ferry-router", "--model_assets", "/no/such/dir", "--workers", "127.0.0.1:1"},
       {"/no/such/dir"}},
      {"port in use",
       {"ferry-router", "--model_assets", DemoModel(), "--workers", "127.0.0.1:1", "--listen",
        system->router_address()},
       {system->router_address()}},
      {"port in use",
       {"ferry-decode", "--model", DemoModel(), "--listen", system->decode(0).address},
       {system->decode(0).address}},
      {"port in use",
       {"ferry-prefill", "--model", DemoModel(), "--listen", system->prefill(0).address},
       {system->prefill(0).address}},
      {"unknown flag", {"ferry-prefill", "--modle", DemoModel()}, {"--modle"}},
      {"bad device", {"ferry-decode", "--model", DemoModel(), "--device", "tpu"}, {"tpu"}},
      {"bad cache dtype",
       {"ferry-decode", "--model", DemoModel(), "--kv_cache_dtype", "int3"},
       {"int3"}},
      // Files that flags name are looked at before the checkpoint, which may take minutes to load.
      {"no certificate",
       {"ferry-prefill", "--model", "/no/such/dir", "--tls_cert", "/no/c.pem", "--tls_key",
        "/no/k.pem"},
       {"/no/k.pem"}},
      {"no certificate",
       {"ferry-decode", "--model", "/no/such/dir", "--tls_ca", "/no/ca.pem"},
       {"certificate and its key"}},
      {"no certificate",
       {"ferry-router", "--model_assets", "/no/such/dir", "--workers", "127.0.0.1:1", "--tls_cert",
        "/no/c.pem", "--tls_key", "/no/k.pem"},
       {"/no/k.pem"}},
      {"port file",
       {"ferry-prefill", "--model", "/no/such/dir", "--port_file", "/no/ports"},
       {"cannot write port file /no/ports: no such file or directory"}},
      {"port file",
       {"ferry-decode", "--model", "/no/such/dir", "--port_file", dir},
       {"cannot write port file " + dir + ": is a directory"}},
      {"port file",
       {"ferry-router", "--model_assets", "/no/such/dir", "--workers", "127.0.0.1:1", "--port_file",
        "/no/ports"},
       {"cannot write port file /no/ports"}},
      // Workers that do not fit each other: `ferry serve` does not wait for what will not come.
      {"links",
       {"ferry", "serve", "--model", DemoModel(), "--port=0", "--prefill_flag=--links=shm",
        "--decode_flag=--links=tcp"},
       {"no data link in common: --links is shm at prefill worker 127.0.0.1:",
        " and tcp at decode worker 127.0.0.1:"}},
      {"kv_cache_dtype",
       {"ferry", "serve", "--model", DemoModel(), "--port=0",
        "--prefill_flag=--kv_cache_dtype=bfloat16", "--decode_flag=--kv_cache_dtype=fp8"},
       {"kv_cache_dtype of cache group latent is bfloat16 at prefill worker 127.0.0.1:",
        " and fp8_latent at decode worker 127.0.0.1:"}},
      {"block_size",
       {"ferry", "serve", "--model", DemoModel(), "--port=0", "--decode_flag=--block_size=128"},
       {"block_size is 64 at prefill worker 127.0.0.1:", " and 128 at decode worker 127.0.0.1:"}},
      {"bad policy",
       {"ferry-router", "--model_assets", DemoModel(), "--workers", "127.0.0.1:1", "--policy",
        "best"},
       {"best"}},
  };
  for (size_t i = 0; i < table.size(); ++i) {
    SCOPED_TRACE(absl::StrCat(table[i].argv[0], ": ", table[i].name));
    std::vector<std::string> argv = table[i].argv;
    argv[0] = absl::StrCat(bin, "/", table[i].argv[0]);
    ChildProcess process = ChildProcess::Start(argv, absl::StrCat(dir, "/log", i));
    const std::optional<int> code = process.Wait(absl::Seconds(60));
    ASSERT_TRUE(code.has_value()) << "still running\n" << process.log();
    EXPECT_NE(*code, 0);
    EXPECT_LT(*code, 128) << process.log();
    for (const std::string& part : table[i].sentence) EXPECT_THAT(process.log(), HasSubstr(part));
  }
}

TEST(BadInputTest, TooLittleSharedMemoryIsNamed) {
  const std::string bin = std::getenv("FERRY_BIN_DIR");
  const std::string small = "mount -t tmpfs -o size=64k tmpfs /dev/shm";
  const auto unshared = [](const std::string& script) {
    return std::vector<std::string>{"/usr/bin/unshare", "--mount", "/bin/sh", "-c", script};
  };
  const std::string dir = MakeTestDir();
  ChildProcess probe = ChildProcess::Start(unshared(small), dir + "/probe");
  if (probe.Wait(absl::Seconds(60)) != 0) GTEST_SKIP() << "no mount namespaces here";
  ChildProcess process = ChildProcess::Start(
      unshared(absl::StrCat(small, " && exec ", bin, "/ferry-prefill --model ", DemoModel(),
                            " --listen 127.0.0.1:0 --metrics_listen 127.0.0.1:0")),
      dir + "/log");
  const std::optional<int> code = process.Wait(absl::Seconds(60));
  ASSERT_TRUE(code.has_value()) << "still running\n" << process.log();
  EXPECT_EQ(*code, 1);
  EXPECT_THAT(
      process.log(),
      HasSubstr("ferry-prefill: ucx shm: creating a worker (/dev/shm has 65536 bytes free"));
}

TEST(BadInputTest, SigtermWhileACheckpointIsLoadedEndsTheProcess) {
  const std::string bin = std::getenv("FERRY_BIN_DIR");
  const std::string dir = MakeTestDir();
  for (const char* name : {"/config.json", "/model.safetensors"}) {
    std::filesystem::create_symlink(std::filesystem::absolute(DemoModel() + name), dir + name);
  }
  // A pipe that nobody writes: a process waits for its first byte as for a slow disk.
  const std::string slow = dir + "/tokenizer.json";
  ASSERT_EQ(mkfifo(slow.c_str(), 0600), 0);
  const std::vector<std::string> cases[] = {
      {"ferry-prefill", "--model", dir},
      {"ferry-decode", "--model", dir},
      {"ferry-router", "--model_assets", dir, "--workers", "127.0.0.1:1"}};
  for (std::vector<std::string> argv : cases) {
    SCOPED_TRACE(argv[0]);
    const std::string log = absl::StrCat(dir, "/", argv[0], ".log");
    argv[0] = absl::StrCat(bin, "/", argv[0]);
    argv.insert(argv.end(), {"--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0"});
    ChildProcess process = ChildProcess::Start(argv, log);
    int fd = -1;
    while ((fd = open(slow.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC)) < 0) {
      ASSERT_EQ(errno, ENXIO);  // it does not read yet
      ASSERT_FALSE(process.Wait(absl::Milliseconds(20)).has_value()) << process.log();
    }
    process.Signal(SIGTERM);
    const std::optional<int> code = process.Wait(absl::Seconds(60));
    close(fd);
    ASSERT_TRUE(code.has_value()) << "still running\n" << process.log();
    EXPECT_EQ(*code, 0) << process.log();
    EXPECT_THAT(process.log(), HasSubstr("stopped while starting signal=15"));
  }
}

}  // namespace
}  // namespace integration

// Bad input of every kind gets one clear error that names the thing and the values; nothing is
// lost.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
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
  ::setenv("CUDA_VISIBLE_DEVICES", "",
           1);  // the processes below see no GPU, also where there is one
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
      {"no GPU",
       {"ferry-decode", "--model", DemoModel(), "--device", "cuda"},
       {"device cuda: this"}},
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

// A directory with the demo model, but for one file: a pipe that nobody writes stands in its place.
std::string ModelWithPipe(const std::string& name) {
  const std::string dir = MakeTestDir();
  for (const auto& file : std::filesystem::directory_iterator(DemoModel())) {
    if (file.path().filename() == name) continue;
    std::filesystem::create_symlink(std::filesystem::absolute(file.path()),
                                    std::filesystem::path(dir) / file.path().filename());
  }
  EXPECT_EQ(mkfifo((dir + "/" + name).c_str(), 0600), 0);
  return dir;
}

TEST(BadInputTest, WhatIsNoFileIsNotWaitedFor) {
  const std::string bin = std::getenv("FERRY_BIN_DIR");
  const std::string pipe = ModelWithPipe("pipe") + "/pipe";
  struct Case {
    std::vector<std::string> argv;
    std::string path;
  };
  std::vector<Case> table = {
      {{"ferry-prefill", "--model", DemoModel(), "--tls_cert", pipe, "--tls_key", pipe}, pipe},
      {{"ferry-router", "--model_assets", DemoModel(), "--workers", "127.0.0.1:1", "--tls_ca", pipe,
        "--tls_cert", pipe, "--tls_key", pipe},
       pipe},
      {{"ferry", "generate", "--address", "127.0.0.1:1", "--tls_ca", pipe, "--prompt", "a"}, pipe},
      {{"ferry", "parity", "--model", DemoModel(), "--golden", pipe}, pipe},
  };
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}) {
    const std::string dir = ModelWithPipe(name);
    const std::string path = absl::StrCat(dir, "/", name);
    table.push_back({{"ferry-prefill", "--model", dir}, path});
    table.push_back({{"ferry-decode", "--model", dir}, path});
    table.push_back({{"ferry", "serve", "--model", dir, "--port", "0"}, path});
  }
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}) {
    const std::string dir = ModelWithPipe(name);
    table.push_back({{"ferry-router", "--model_assets", dir, "--workers", "127.0.0.1:1"},
                     absl::StrCat(dir, "/", name)});
  }
  const std::string dir = MakeTestDir();
  for (size_t i = 0; i < table.size(); ++i) {
    std::vector<std::string> argv = table[i].argv;
    SCOPED_TRACE(absl::StrCat(argv[0], " ", argv[1], ": ", table[i].path));
    // Whatever else listens on a default port.
    if (argv[0] != "ferry") argv.push_back("--listen=127.0.0.1:0");
    argv[0] = absl::StrCat(bin, "/", argv[0]);
    ChildProcess process = ChildProcess::Start(argv, absl::StrCat(dir, "/log", i));
    const std::optional<int> code = process.Wait(absl::Seconds(30));
    EXPECT_EQ(code.value_or(-1), 1) << process.log();
    EXPECT_THAT(process.log(), HasSubstr(table[i].path + ": not a regular file"));
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
  const std::string ports = dir + "/ports";
  ChildProcess process = ChildProcess::Start(
      unshared(absl::StrCat(small, " && exec ", bin, "/ferry-prefill --model ", DemoModel(),
                            " --listen 127.0.0.1:0 --metrics_listen 127.0.0.1:0 --port_file ",
                            ports)),
      dir + "/log");
  // Some versions of UCX do with System V segments alone; then it serves.
  std::optional<int> code;
  bool serves = false;
  for (int i = 0; i < 60 && !code.has_value() && !serves; ++i) {
    code = process.Wait(absl::Milliseconds(500));
    serves = std::filesystem::exists(ports);
  }
  if (serves) {
    process.Signal(SIGTERM);
    EXPECT_EQ(process.Wait(absl::Seconds(60)).value_or(-1), 0) << process.log();
    return;
  }
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
  // A file under a lease: whoever opens it waits until we give it up, as for a slow disk.
  const std::string slow = dir + "/tokenizer.json";
  std::filesystem::copy_file(DemoModel() + "/tokenizer.json", slow);
  const int fd = open(slow.c_str(), O_RDWR | O_CLOEXEC);
  signal(SIGIO, SIG_IGN);  // says that somebody waits
  const std::vector<std::string> cases[] = {
      {"ferry-prefill", "--model", dir},
      {"ferry-decode", "--model", dir},
      {"ferry-router", "--model_assets", dir, "--workers", "127.0.0.1:1"}};
  for (std::vector<std::string> argv : cases) {
    SCOPED_TRACE(argv[0]);
    const std::string log = absl::StrCat(dir, "/", argv[0], ".log");
    argv[0] = absl::StrCat(bin, "/", argv[0]);
    argv.insert(argv.end(), {"--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0"});
    if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) {
      GTEST_SKIP() << "no leases on " << slow << ": " << std::strerror(errno);
    }
    ChildProcess process = ChildProcess::Start(argv, log);
    while (fcntl(fd, F_GETLEASE) == F_WRLCK) {  // nobody waits yet
      ASSERT_FALSE(process.Wait(absl::Milliseconds(20)).has_value()) << process.log();
    }
    process.Signal(SIGTERM);
    const std::optional<int> code = process.Wait(absl::Seconds(60));
    fcntl(fd, F_SETLEASE, F_UNLCK);
    ASSERT_TRUE(code.has_value()) << "still running\n" << process.log();
    EXPECT_EQ(*code, 0) << process.log();
    EXPECT_THAT(process.log(), HasSubstr("stopped while starting signal=15"));
  }
  close(fd);
}

}  // namespace
}  // namespace integration

// Supervision with scripts in place of the servers; the real ones run in tests/integration.

#include "cli/local_system.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "service/grpc_server.h"

namespace cli {
namespace {

// Scripts write their port file and wait.
constexpr char kUp[] =
    "for a in \"$@\"; do case $a in --port_file=*) echo grpc_port=1 > ${a#--port_file=};; esac; "
    "done\n"
    "echo up $*\nexec sleep 1000\n";

class LocalSystemTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "local_system_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
    std::filesystem::create_directory(dir_ + "/model");
    std::ofstream(dir_ + "/model/config.json") << "{}";
    for (const char* name : {"ferry-prefill", "ferry-decode", "ferry-router"}) Script(name, kUp);
    options_ = {.model_dir = dir_ + "/model/", .bin_dir = dir_, .port = 0};
    options_.log_path = dir_ + "/log";
    options_.ready_timeout = absl::Seconds(20);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void Script(const std::string& name, const std::string& body) {
    const std::string path = dir_ + "/" + name;
    std::ofstream(path) << "#!/bin/sh\n" << body;
    chmod(path.c_str(), 0755);
  }
  std::string StartError() {
    const auto system = LocalSystem::Start(options_);
    return system.ok() ? "started" : std::string(system.status().message());
  }

  std::string dir_;
  LocalSystemOptions options_;
};

TEST_F(LocalSystemTest, AWorkerThatDiesWhileStartingIsNamed) {
  Script("ferry-decode", "echo 'ferry-decode: no room'; exit 1\n");
  EXPECT_EQ(StartError(), "decode-0 exited with status 1: ferry-decode: no room");
}

TEST_F(LocalSystemTest, ARouterThatDiesIsNamed) {
  Script("ferry-router", "echo 'ferry-router: port in use'; exit 1\n");
  EXPECT_EQ(StartError(), "router exited with status 1: ferry-router: port in use");
}

TEST_F(LocalSystemTest, AWorkerThatDiesWhileTheRouterWaitsIsNamed) {
  // Both are up; the prefill worker ends, and nobody answers as the router.
  Script("ferry-prefill",
         "for a in \"$@\"; do case $a in --port_file=*) echo grpc_port=1 > ${a#--port_file=};; "
         "esac; done\n"
         "sleep 0.3; exit 7\n");
  EXPECT_EQ(StartError(), "prefill-0 exited with status 7");
}

TEST_F(LocalSystemTest, WhatIsNeverReadyEndsAtTheTimeout) {
  options_.ready_timeout = absl::Milliseconds(500);
  EXPECT_EQ(StartError(), "not ready after 500ms: the router does not answer");
  Script("ferry-prefill", "exec sleep 1000\n");
  EXPECT_EQ(StartError(), "prefill-0 is not up after 500ms");
}

TEST_F(LocalSystemTest, ProcessesGetTheirFlags) {
  options_.ready_timeout = absl::Milliseconds(500);
  options_.num_decode = 2;
  options_.role_both = true;
  options_.worker_flags = {"--dtype=float32"};
  options_.prefill_flags = {"--chunk_tokens=64"};
  options_.router_flags = {"--policy=round_robin"};
  EXPECT_NE(StartError(), "started");
  std::ifstream file(options_.log_path);
  const std::string log((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* part : {"prefill-0 | up", "decode-0 | up", "decode-1 | up", "router | up",
                           "--dtype=float32 --chunk_tokens=64", "--dtype=float32 --role=both",
                           "--workers=127.0.0.1:1,127.0.0.1:1,127.0.0.1:1", "--policy=round_robin",
                           "--model_name=model", "--model_assets=model="}) {
    EXPECT_NE(log.find(part), std::string::npos) << part << " in\n" << log;
  }
}

TEST_F(LocalSystemTest, WhatIsWrongWithFlagsIsSaidBeforeAnythingIsStarted) {
  options_.port_file = "/nowhere/ports";
  EXPECT_EQ(StartError(), "cannot write port file /nowhere/ports: no such file or directory");
  options_.port_file.clear();
  options_.tls.cert_file = "/nowhere/cert.pem";
  options_.tls.key_file = "/nowhere/key.pem";
  EXPECT_EQ(StartError(), "tls key: no such file: /nowhere/key.pem");
  options_.tls = {};
  const auto other = service::GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(other.ok());
  options_.port = (*other)->port();
  EXPECT_EQ(StartError(), "cannot listen on 127.0.0.1:" + std::to_string(options_.port) +
                              ": address already in use");
  EXPECT_FALSE(std::filesystem::exists(options_.log_path));
}

TEST_F(LocalSystemTest, TlsFilesMustSuitThisMachineAndGoToEveryProcess) {
  const std::string script =
      "cd " + dir_ +
      " && k='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes' && "
      "openssl req -x509 $k -keyout ca.key -out ca.pem -days 2 -subj /CN=ca && "
      "for n in IP:127.0.0.1 DNS:elsewhere; do f=${n%:*} && "
      "openssl req $k -keyout $f.key -out $f.csr -subj /CN=$f && echo subjectAltName=$n > ext && "
      "openssl x509 -req -in $f.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext "
      "-out $f.pem || exit 1; done";
  ASSERT_EQ(std::system(("(" + script + ") >/dev/null 2>&1").c_str()), 0);
  options_.ready_timeout = absl::Milliseconds(500);
  options_.tls = {.cert_file = dir_ + "/IP.pem", .key_file = dir_ + "/IP.key", .ca_file = ""};
  EXPECT_NE(StartError().find("--tls_cert, --tls_key and --tls_ca are needed together"),
            std::string::npos);
  options_.tls.ca_file = dir_ + "/ca.pem";
  EXPECT_EQ(StartError(), "not ready after 500ms: the router does not answer");
  std::ifstream file(options_.log_path);
  const std::string log((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* name : {"prefill-0 | ", "decode-0 | ", "router | "}) {
    const size_t at = log.find(name);
    const std::string line = log.substr(at, log.find('\n', at) - at);
    for (const std::string& flag :
         {"--tls_cert=" + options_.tls.cert_file, "--tls_key=" + options_.tls.key_file,
          "--tls_ca=" + options_.tls.ca_file}) {
      EXPECT_NE(line.find(flag), std::string::npos) << flag << " in " << line;
    }
  }
  options_.tls = {
      .cert_file = dir_ + "/DNS.pem", .key_file = dir_ + "/DNS.key", .ca_file = dir_ + "/ca.pem"};
  EXPECT_NE(StartError().find("cannot be called at 127.0.0.1"), std::string::npos);
  options_.tls.key_file = dir_ + "/IP.key";
  EXPECT_NE(StartError().find("DNS.pem with key"), std::string::npos);
}

TEST_F(LocalSystemTest, RefusesWhatCannotServe) {
  options_.num_prefill = 0;
  EXPECT_EQ(StartError(),
            "need at least one decode worker, and a prefill worker, --role_both, or "
            "--router_flag=--local_prefill_tokens=N of the model's length");
  options_.num_prefill = 1;
  options_.model_dir = dir_;
  EXPECT_EQ(StartError(), dir_ + " is not a checkpoint: no such file: " + dir_ + "/config.json");
  for (const std::string name : {"a=b", "a,b"}) {
    std::filesystem::copy(dir_ + "/model", dir_ + "/" + name);
    options_.model_dir = dir_ + "/" + name;
    EXPECT_EQ(StartError(), "--model " + options_.model_dir +
                                ": a served directory has no '=' in its name and no ',' in its "
                                "path; link it under another name");
  }
  options_.model_dir = dir_ + "/model";
  std::filesystem::remove(dir_ + "/ferry-prefill");
  EXPECT_EQ(StartError(), "cannot run " + dir_ + "/ferry-prefill: No such file or directory");
}

}  // namespace
}  // namespace cli

#include "cli/router_flags.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"

namespace cli {
namespace {

using testing::HasSubstr;

// A server that demands certificates, and the files of it and of a client, made by openssl.
class RouterFlagsTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = absl::StrCat(testing::TempDir(), "router_flags.", getpid());
    std::filesystem::create_directories(dir_);
    const std::string script = absl::StrCat(
        "cd ", dir_, " && k='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes' && ",
        "openssl req -x509 $k -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca && ",
        "for n in server client; do ", "openssl req $k -keyout $n.key -out $n.csr -subj /CN=$n && ",
        "echo subjectAltName=DNS:localhost > ext && ",
        "openssl x509 -req -in $n.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 ",
        "-extfile ext -out $n.pem || exit 1; done");
    ASSERT_EQ(std::system(absl::StrCat("(", script, ") >/dev/null 2>&1").c_str()), 0);
    auto server = service::GrpcServer::Start(
        "127.0.0.1:0", {File("server.pem"), File("server.key"), File("ca.pem")}, {});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string File(const std::string& name) const { return absl::StrCat(dir_, "/", name); }
  ferry::ClientOptions Options(const std::string& ca, const std::string& cert,
                               const std::string& key) const {
    return {.address = absl::StrCat("localhost:", server_->port()),
            .tls_ca_file = ca.empty() ? "" : File(ca),
            .tls_cert_file = cert.empty() ? "" : File(cert),
            .tls_key_file = key.empty() ? "" : File(key)};
  }
  static absl::Status Call(const ferry::ClientOptions& options) {
    const auto client = ferry::Client::Create(options);
    if (!client.ok()) return client.status();
    return ExplainConnection((*client)->ListModels().status(), options);
  }
  static std::string Said(const ferry::ClientOptions& options) {
    return std::string(Call(options).message());
  }

  std::string dir_;
  std::unique_ptr<service::GrpcServer> server_;
};

TEST_F(RouterFlagsTest, WithoutTlsItIsNamed) {
  EXPECT_THAT(Said(Options("", "", "")), HasSubstr("if it expects TLS, give --tls_ca"));
}

TEST_F(RouterFlagsTest, AMissingClientCertificateIsAskedFor) {
  EXPECT_THAT(Said(Options("ca.pem", "", "")), HasSubstr("(--tls_cert, --tls_key)?"));
}

TEST_F(RouterFlagsTest, FilesThatDoNotBelongTogether) {
  EXPECT_THAT(Said(Options("ca.pem", "client.pem", "server.key")),
              HasSubstr("is --tls_ca a certificate, and --tls_key the key of --tls_cert?"));
  EXPECT_THAT(Said(Options("ca.key", "", "")), HasSubstr("is --tls_ca a certificate"));
}

TEST_F(RouterFlagsTest, ARightCallReachesTheServer) {
  // It has no such method, as a worker has none.
  const ferry::ClientOptions options = Options("ca.pem", "client.pem", "client.key");
  EXPECT_EQ(Call(options), absl::UnimplementedError(absl::StrCat(
                               options.address,
                               " is no router: it does not serve Inference.ListModels; give the "
                               "router's address")));
}

TEST(ExplainConnectionTest, OtherErrorsStayAsTheyAre) {
  const ferry::ClientOptions options = {.address = "a:1"};
  for (const absl::Status& status :
       {absl::OkStatus(), absl::NotFoundError("model x is not served here"),
        absl::UnavailableError("failed to connect to all addresses; last error: UNKNOWN: "
                               "ipv4:127.0.0.1:1: Connection refused")}) {
    EXPECT_EQ(ExplainConnection(status, options), status);
  }
  EXPECT_EQ(
      ExplainConnection(
          absl::DeadlineExceededError("not ready after 1s: the router does not answer"), options)
          .message(),
      "not ready after 1s: the router does not answer at a:1; if it expects TLS, give "
      "--tls_ca");
}

}  // namespace
}  // namespace cli

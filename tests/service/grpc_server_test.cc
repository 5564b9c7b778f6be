#include "service/grpc_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>

#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

namespace service {
namespace {

using ::testing::HasSubstr;

class Echo final : public ferry::v1::Inference::Service {
  grpc::Status Detokenize(grpc::ServerContext*, const ferry::v1::DetokenizeRequest* request,
                          ferry::v1::DetokenizeResponse* response) override {
    response->set_text(request->model());
    return grpc::Status::OK;
  }
};

std::string AddressOf(const GrpcServer& server) {
  return "localhost:" + std::to_string(server.port());
}

// One unary call with raw bytes: health.proto is not among the generated files.
grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  const grpc::Slice slice(request);
  const grpc::ByteBuffer buffer(&slice, 1);
  auto call = stub.PrepareUnaryCall(&context, method, buffer, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  grpc::Slice whole;
  if (status.ok() && reply.DumpToSingleSlice(&whole).ok()) {
    response->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
  }
  return status;
}

// 1: SERVING, 2: NOT_SERVING, -NOT_FOUND for an unknown name.
int Health(const GrpcServer& server, const std::string& name) {
  const std::string request =
      name.empty() ? "" : std::string("\x0a") + static_cast<char>(name.size()) + name;
  std::string response;
  const grpc::Status status = RawCall(MakeChannel(AddressOf(server), {}),
                                      "/grpc.health.v1.Health/Check", request, &response);
  if (!status.ok()) return -status.error_code();
  return response.size() == 2 ? response[1] : 0;
}

grpc::Status Ping(const std::shared_ptr<grpc::Channel>& channel) {
  auto stub = ferry::v1::Inference::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  ferry::v1::DetokenizeRequest request;
  ferry::v1::DetokenizeResponse response;
  return stub->Detokenize(&context, request, &response);
}

TEST(GrpcServerTest, HealthFollowsReadinessByName) {
  Echo echo;
  auto server = GrpcServer::Start("127.0.0.1:0", {}, {&echo});
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_GT((*server)->port(), 0);
  EXPECT_EQ(Health(**server, ""), 1);
  EXPECT_EQ(Health(**server, "liveness"), 1);
  EXPECT_EQ(Health(**server, "readiness"), 2);
  EXPECT_EQ(Health(**server, "ferry.v1.Inference"), 2);
  EXPECT_EQ(Health(**server, "nobody"), -grpc::StatusCode::NOT_FOUND);
  (*server)->SetReady(true);
  EXPECT_EQ(Health(**server, "readiness"), 1);
  EXPECT_EQ(Health(**server, "ferry.v1.Inference"), 1);
  (*server)->SetReady(false);
  EXPECT_EQ(Health(**server, "ferry.v1.Inference"), 2);
  EXPECT_EQ(Health(**server, "liveness"), 1);
}

// Answers Tokenize when it is released.
class Slow final : public ferry::v1::Inference::Service {
 public:
  void AwaitCall() { called_.get_future().wait(); }
  void Release() { released_.set_value(); }

 private:
  grpc::Status Tokenize(grpc::ServerContext*, const ferry::v1::TokenizeRequest*,
                        ferry::v1::TokenizeResponse*) override {
    called_.set_value();
    released_.get_future().wait();
    return grpc::Status::OK;
  }
  std::promise<void> called_, released_;
};

TEST(GrpcServerTest, ClientsOfARetiredServerGoElsewhereAndRunningCallsEnd) {
  Slow slow;
  Echo echo;
  auto retired = GrpcServer::Start("127.0.0.1:0", {}, {&slow});
  auto other = GrpcServer::Start("127.0.0.1:0", {}, {&echo});
  const auto channel = grpc::CreateChannel("ipv4:127.0.0.1:" + std::to_string((*retired)->port()) +
                                               ",127.0.0.1:" + std::to_string((*other)->port()),
                                           grpc::InsecureChannelCredentials());
  const auto stub = ferry::v1::Inference::NewStub(channel);
  std::future<grpc::Status> running = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    ferry::v1::TokenizeResponse response;
    return stub->Tokenize(&context, {}, &response);
  });
  slow.AwaitCall();
  (*retired)->Retire();
  // Until the client has heard of it its calls come here and fail.
  ferry::v1::DetokenizeRequest request;
  request.set_model("m");
  ferry::v1::DetokenizeResponse response;
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(30);
  grpc::Status status;
  do {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    status = stub->Detokenize(&context, request, &response);
  } while (!status.ok() && std::chrono::system_clock::now() < deadline);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.text(), "m");
  EXPECT_NE(running.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  slow.Release();
  EXPECT_TRUE(running.get().ok());
  (*retired)->Shutdown(absl::InfiniteDuration());
}

TEST(GrpcServerTest, TwoServersInOneProcessBothHaveReflectionAndServe) {
  Echo first, second;
  auto a = GrpcServer::Start("127.0.0.1:0", {}, {&first});
  auto b = GrpcServer::Start("127.0.0.1:0", {}, {&second});
  ASSERT_TRUE(a.ok() && b.ok());
  for (const GrpcServer* server : {a->get(), b->get()}) {
    auto channel = MakeChannel(AddressOf(*server), {});
    EXPECT_TRUE(Ping(channel).ok());
    // A stream that gets no request ends with an error of its own, not with UNIMPLEMENTED.
    std::string response;
    EXPECT_NE(RawCall(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "",
                      &response)
                  .error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_EQ(RawCall(channel, "/nobody/Nothing", "", &response).error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
  }
}

TEST(GrpcServerTest, APortInUseIsUnavailableAndNamed) {
  auto first = GrpcServer::Start("127.0.0.1:0", {}, {});
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  const absl::Status second = GrpcServer::Start(address, {}, {}).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.message(), "cannot listen on " + address + ": address already in use");
}

TEST(GrpcServerTest, ABadAddressIsInvalid) {
  EXPECT_EQ(GrpcServer::Start("nonsense", {}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GrpcServerTest, AMessageOverTheLimitIsRefused) {
  Echo echo;
  auto server = GrpcServer::Start("127.0.0.1:0", {}, {&echo});
  ASSERT_TRUE(server.ok());
  auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(AddressOf(**server), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  ferry::v1::DetokenizeRequest request;
  request.set_model(std::string(kMaxMessageBytes + 1, 'x'));
  ferry::v1::DetokenizeResponse response;
  EXPECT_EQ(stub->Detokenize(&context, request, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

// A certificate authority, a server's and a client's certificate, made by openssl for this run.
class TlsTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "tls." + std::to_string(getpid());
    std::filesystem::create_directories(dir_);
    const std::string script =
        "cd " + dir_ +
        " && k='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes' && "
        "openssl req -x509 $k -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca && "
        "for n in server client; do "
        "openssl req $k -keyout $n.key -out $n.csr -subj /CN=$n && "
        "echo subjectAltName=DNS:localhost > ext && "
        "openssl x509 -req -in $n.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile "
        "ext "
        "-out $n.pem || exit 1; done";
    ASSERT_EQ(std::system(("(" + script + ") >/dev/null 2>&1").c_str()), 0);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  TlsOptions Options(const std::string& name, bool with_ca) const {
    TlsOptions tls;
    if (!name.empty()) {
      tls.cert_file = dir_ + "/" + name + ".pem";
      tls.key_file = dir_ + "/" + name + ".key";
    }
    if (with_ca) tls.ca_file = dir_ + "/ca.pem";
    return tls;
  }

  std::string dir_;
};

TEST_F(TlsTest, ServerWithCertificateIsTrustedThroughTheCa) {
  Echo echo;
  auto server = GrpcServer::Start("127.0.0.1:0", Options("server", false), {&echo});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(Ping(MakeChannel(AddressOf(**server), Options("", true))).ok());
  EXPECT_FALSE(Ping(MakeChannel(AddressOf(**server), {})).ok());
}

TEST_F(TlsTest, ServerWithCaDemandsAClientCertificate) {
  Echo echo;
  auto server = GrpcServer::Start("127.0.0.1:0", Options("server", true), {&echo});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(Ping(MakeChannel(AddressOf(**server), Options("client", true))).ok());
  EXPECT_FALSE(Ping(MakeChannel(AddressOf(**server), Options("", true))).ok());
}

TEST_F(TlsTest, BadFilesAreNamed) {
  TlsOptions tls = Options("server", false);
  tls.cert_file = dir_ + "/missing.pem";
  absl::Status status = GrpcServer::Start("127.0.0.1:0", tls, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing.pem"));

  tls.cert_file = dir_ + "/garbage.pem";
  std::ofstream(tls.cert_file) << "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
  status = GrpcServer::Start("127.0.0.1:0", tls, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("garbage.pem"));

  tls.key_file.clear();
  EXPECT_EQ(GrpcServer::Start("127.0.0.1:0", tls, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace service

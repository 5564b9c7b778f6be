#include "service/grpc_server.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "grpc/grpc.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_initializer.h"
#include "input_file/input_file.h"
#include "service/abandoned_channels.h"
#include "service/listen_address.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace service {
namespace {

constexpr char kLiveness[] = "liveness";
constexpr char kReadiness[] = "readiness";

// Client pings while calls are open; a server accepts pings three times as often.
constexpr int kKeepalivePingMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;
constexpr int kMinAcceptedPingMs = 10'000;
// Connections end after an hour so that clients behind a load balancer spread again.  The grace is
// longer than the default deadline of a request: no request is cut; watchers reconnect.
constexpr int kMaxConnectionAgeMs = 3'600'000;
constexpr int kMaxConnectionAgeGraceMs = 900'000;
// A restarted worker must be reached again within seconds, not within gRPC's default two minutes.
constexpr int kFirstReconnectMs = 100;
constexpr int kMaxReconnectMs = 2'000;

constexpr int64_t kMaxPemBytes = 16 << 20;

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* what) {
  absl::StatusOr<std::string> text = input_file::Read(path, kMaxPemBytes);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", std::string(text.status().message())));
  }
  if (text->find("-----BEGIN ") == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, " is not a PEM file"));
  }
  return text;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsOptions& tls) {
  if (!tls.enabled() && tls.key_file.empty()) return grpc::InsecureServerCredentials();
  if (tls.cert_file.empty() || tls.key_file.empty()) {
    return absl::InvalidArgumentError("tls needs both a certificate and its key on a server");
  }
  grpc::SslServerCredentialsOptions options(
      tls.ca_file.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                          : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  grpc::SslServerCredentialsOptions::PemKeyCertPair pair;
  ASSIGN_OR_RETURN(pair.private_key, ReadPem(tls.key_file, "tls key"));
  ASSIGN_OR_RETURN(pair.cert_chain, ReadPem(tls.cert_file, "tls certificate"));
  options.pem_key_cert_pairs.push_back(std::move(pair));
  if (!tls.ca_file.empty()) {
    ASSIGN_OR_RETURN(options.pem_root_certs, ReadPem(tls.ca_file, "tls ca"));
  }
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsOptions& tls) {
  if (!tls.enabled()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  // A file that has become unreadable since start: the handshake fails, and the call says so.
  if (auto pem = ReadPem(tls.ca_file, "tls ca"); pem.ok()) options.pem_root_certs = *pem;
  if (auto pem = ReadPem(tls.cert_file, "tls certificate"); pem.ok()) {
    options.pem_cert_chain = *pem;
  }
  if (auto pem = ReadPem(tls.key_file, "tls key"); pem.ok()) options.pem_private_key = *pem;
  return grpc::SslCredentials(options);
}

void EnablePluginsOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

// Servers and channels share gRPC's threads for callbacks, and whoever lets go of the last of them
// stops those threads and waits for them.  In a callback that is such a thread itself, and
// gRPC 1.51 aborts.  So that callbacks may let go of anything, one channel that has used the
// threads stays for the life of the process.  It connects to nothing: its calls fail at once.
void KeepCallbackThreads() {
  static std::once_flag once;
  std::call_once(once, [] {
    static const auto* const channel =
        new std::shared_ptr<grpc::Channel>(grpc::CreateChannel("", nullptr));
    grpc::GenericStub stub(*channel);
    grpc::ClientContext context;
    const grpc::Slice none("");
    const grpc::ByteBuffer request(&none, 1);
    grpc::ByteBuffer response;
    std::promise<void> ended;
    stub.UnaryCall(&context, "/none", grpc::StubOptions(), &request, &response,
                   [&ended](const grpc::Status&) { ended.set_value(); });
    ended.get_future().wait();
  });
}

// Learns the full names of the registered services, which grpc::Service keeps to itself.
class ServiceNamesPlugin final : public grpc::ServerBuilderPlugin {
 public:
  explicit ServiceNamesPlugin(std::vector<std::string>* names) : names_(names) {}
  std::string name() override { return "ferry_service_names"; }
  void InitServer(grpc::ServerInitializer*) override {}
  void Finish(grpc::ServerInitializer* initializer) override {
    for (const std::string& name : *initializer->GetServiceList()) {
      if (name.rfind("grpc.", 0) != 0) names_->push_back(name);  // health and reflection themselves
    }
  }
  void ChangeArguments(const std::string&, void*) override {}

 private:
  std::vector<std::string>* const names_;
};

class ServiceNamesOption final : public grpc::ServerBuilderOption {
 public:
  explicit ServiceNamesOption(std::vector<std::string>* names) : names_(names) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->push_back(std::make_unique<ServiceNamesPlugin>(names_));
  }

 private:
  std::vector<std::string>* const names_;
};

absl::Status WhyNotStarted(const std::string& address, const TlsOptions& tls) {
  RETURN_IF_ERROR(CheckCanListen(address));  // another process was faster
  if (tls.enabled()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls certificate ", tls.cert_file, " with key ", tls.key_file,
                     tls.ca_file.empty() ? "" : " and ca ", tls.ca_file, " cannot be used"));
  }
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const std::string& address, const TlsOptions& tls,
    const std::vector<grpc::Service*>& services) {
  // gRPC says only that it failed, and that on stderr.
  RETURN_IF_ERROR(CheckCanListen(address));
  ASSIGN_OR_RETURN(auto credentials, MakeServerCredentials(tls));
  EnablePluginsOnce();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, credentials, &port);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // Without this a second process on the same port would share its connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinAcceptedPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepalivePingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kMaxConnectionAgeGraceMs);
  for (grpc::Service* service : services) builder.RegisterService(service);

  auto server = std::unique_ptr<GrpcServer>(new GrpcServer);
  builder.SetOption(std::make_unique<ServiceNamesOption>(&server->service_names_));
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || port == 0) return WhyNotStarted(address, tls);
  server->port_ = port;
  server->server_->GetHealthCheckService()->SetServingStatus("", true);
  server->server_->GetHealthCheckService()->SetServingStatus(kLiveness, true);
  server->SetReady(false);
  return server;
}

absl::Status CheckServerTls(const TlsOptions& tls) {
  if (!tls.enabled() && tls.key_file.empty()) return absl::OkStatus();
  // gRPC looks into the files only when a server is made of them.
  return GrpcServer::Start("127.0.0.1:0", tls, {}).status();
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetReady(bool ready) {
  auto* health = server_->GetHealthCheckService();
  health->SetServingStatus(kReadiness, ready);
  for (const std::string& name : service_names_) health->SetServingStatus(name, ready);
}

void GrpcServer::Retire() {
  if (calls_ended_.valid()) return;
  // It waits for the calls that run; what ends them is Shutdown's matter.
  calls_ended_ = std::async(std::launch::async, [this] { server_->Shutdown(); });
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  Retire();
  // A clock cannot count to the end of time.
  const auto wait = absl::ToChronoMilliseconds(std::min(grace, absl::Hours(24)));
  if (calls_ended_.wait_for(wait) != std::future_status::ready) {
    grpc_server_cancel_all_calls(server_->c_server());
  }
  calls_ended_.wait();
  server_->Wait();
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const TlsOptions& tls) {
  KeepCallbackThreads();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepalivePingMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  // A name may lead elsewhere when its process has been replaced.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  return EndedWhenConnected(
      grpc::CreateCustomChannel(address, MakeChannelCredentials(tls), arguments));
}

absl::Status CallHealth(const std::string& address, const TlsOptions& tls, absl::Duration timeout) {
  struct Call {  // lives until gRPC has done with it
    grpc::ClientContext context;
    const grpc::Slice none = grpc::Slice("");
    const grpc::ByteBuffer request = grpc::ByteBuffer(&none, 1);
    grpc::ByteBuffer response;
    std::promise<grpc::Status> ended;
  };
  auto call = std::make_shared<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() +
                             absl::ToChronoMilliseconds(timeout));
  std::future<grpc::Status> ended = call->ended.get_future();
  grpc::GenericStub stub(MakeChannel(address, tls));
  stub.UnaryCall(&call->context, "/grpc.health.v1.Health/Check", grpc::StubOptions(),
                 &call->request, &call->response,
                 [call](const grpc::Status& status) { call->ended.set_value(status); });
  return status::FromGrpc(ended.get());
}

}  // namespace service

#include "cli/health_command.h"

#include <chrono>
#include <future>
#include <iostream>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cli/router_flags.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "service/command_line.h"
#include "service/grpc_server.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace cli {
namespace {

// HealthCheckRequest{service = name} and HealthCheckResponse{status = SERVING} as protobuf writes
// them: gRPC keeps their classes to itself.
constexpr size_t kMaxName = 127;  // its length is one byte
constexpr char kServing[] = "\x08\x01";

struct Options {
  ferry::ClientOptions client;
  std::string service = "readiness";
  absl::Duration timeout = absl::Seconds(2);
};

absl::StatusOr<std::string> Ask(const Options& options) {
  struct Call {  // lives until gRPC has done with it
    explicit Call(const std::string& bytes) : slice(bytes), request(&slice, 1) {}
    const grpc::Slice slice;
    const grpc::ByteBuffer request;
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    std::promise<grpc::Status> ended;
  };
  const auto call = std::make_shared<Call>(absl::StrCat(
      "\x0a", std::string(1, static_cast<char>(options.service.size())), options.service));
  call->context.set_deadline(std::chrono::system_clock::now() +
                             absl::ToChronoMilliseconds(options.timeout));
  std::future<grpc::Status> ended = call->ended.get_future();
  const ferry::ClientOptions& client = options.client;
  grpc::GenericStub stub(service::MakeChannel(
      client.address, {client.tls_cert_file, client.tls_key_file, client.tls_ca_file}));
  stub.UnaryCall(&call->context, "/grpc.health.v1.Health/Check", grpc::StubOptions(),
                 &call->request, &call->response,
                 [call](const grpc::Status& status) { call->ended.set_value(status); });
  RETURN_IF_ERROR(status::FromGrpc(ended.get()));
  grpc::Slice answer;
  if (!call->response.Valid() || !call->response.DumpToSingleSlice(&answer).ok()) return "";
  return std::string(reinterpret_cast<const char*>(answer.begin()), answer.size());
}

absl::Status Run(const Options& options) {
  if (options.service.empty() || options.service.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrCat("--service: ", options.service.size(), " bytes are no service's name"));
  }
  const absl::StatusOr<std::string> answer = Ask(options);
  if (absl::IsNotFound(answer.status())) {
    return absl::NotFoundError(
        absl::StrCat(options.client.address, " knows no service ", options.service));
  }
  if (absl::IsDeadlineExceeded(answer.status())) {
    return absl::DeadlineExceededError(absl::StrCat(options.client.address,
                                                    " has not answered within ",
                                                    absl::FormatDuration(options.timeout)));
  }
  if (!answer.ok()) {
    const absl::Status explained = ExplainConnection(answer.status(), options.client);
    return absl::Status(explained.code(), absl::StrCat(options.client.address, ": ",
                                                       std::string(explained.message())));
  }
  if (*answer != kServing) {
    return absl::UnavailableError(
        absl::StrCat(options.client.address, ": ", options.service, " is not serving"));
  }
  std::cout << options.service << " serving\n";
  return absl::OkStatus();
}

}  // namespace

void AddHealthCommand(CLI::App& app, absl::Status* result) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "health", "Ask a router or worker whether it serves; exit code 0: it does");
  AddAddressFlag(*command, "Its host:port", &options->client)->required();
  command
      ->add_option("--service", options->service,
                   "readiness, liveness, or the full name of a gRPC service of it")
      ->capture_default_str();
  service::AddSecondsFlag(*command, "--timeout_s", &options->timeout, "How long to wait")
      ->check(CLI::PositiveNumber);
  AddTlsFlags(*command, &options->client);
  command->callback([options, result] { *result = Run(*options); });
}

}  // namespace cli

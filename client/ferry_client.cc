#include "client/ferry_client.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "input_file/input_file.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"

namespace ferry {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;

constexpr int64_t kMaxPemBytes = 16 << 20;
constexpr int kMaxMessageBytes = 64 << 20;
constexpr int kKeepalivePingMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;
constexpr int kMaxReconnectMs = 2'000;
constexpr int kMaxAttempts = 5;  // gRPC makes no more
constexpr int kMaxBackoffS = 10;
// Readiness of a router can only be asked for; this often.
constexpr absl::Duration kReadyPollInterval = absl::Milliseconds(50);
constexpr int kMaxSentences = 3;  // about workers, in one error; with many they all say the same

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  if (path.empty()) return "";
  absl::StatusOr<std::string> text = input_file::Read(path, kMaxPemBytes);
  if (text.ok()) return text;
  return absl::InvalidArgumentError(
      absl::StrCat("tls file: ", std::string(text.status().message())));
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options) {
  if (options.tls_ca_file.empty() && options.tls_cert_file.empty() &&
      options.tls_key_file.empty()) {
    return grpc::InsecureChannelCredentials();
  }
  if (options.tls_cert_file.empty() != options.tls_key_file.empty()) {
    return absl::InvalidArgumentError("a tls certificate and its key are needed together");
  }
  grpc::SslCredentialsOptions ssl;
  ASSIGN_OR_RETURN(ssl.pem_root_certs, ReadPem(options.tls_ca_file));
  ASSIGN_OR_RETURN(ssl.pem_cert_chain, ReadPem(options.tls_cert_file));
  ASSIGN_OR_RETURN(ssl.pem_private_key, ReadPem(options.tls_key_file));
  return grpc::SslCredentials(ssl);
}

std::chrono::system_clock::time_point DeadlineIn(absl::Duration timeout) {
  // Beyond a day the clock's range could be left.
  return std::chrono::system_clock::now() +
         absl::ToChronoMilliseconds(std::min(timeout, absl::Hours(24)));
}

absl::Status CancelledByCaller() {
  return absl::CancelledError("the caller cancelled the generation");
}

// Workers are gRPC servers too, and say of `method` no more than that they do not have it.
absl::Status ErrorOf(const grpc::Status& status, const std::string& address, const char* method) {
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
    return absl::UnimplementedError(absl::StrCat(address,
                                                 " is no router: it does not serve Inference.",
                                                 method, "; give the router's address"));
  }
  return status::FromGrpc(status);
}

// gRPC makes the attempts: it knows whether anything of an answer has come.  A router that ends
// cuts off what arrives before its clients have heard of it, and gRPC calls that CANCELLED; what
// the caller cancels is not made again.
std::string RetryPolicy(const ClientOptions& options) {
  return absl::StrFormat(
      R"({"methodConfig": [{"name": [{"service": "ferry.v1.Inference"}], "retryPolicy": {
          "maxAttempts": %d, "initialBackoff": "%.3fs", "maxBackoff": "%ds", "backoffMultiplier": 2,
          "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"]}}]})",
      options.max_attempts, absl::ToDoubleSeconds(options.first_backoff), kMaxBackoffS);
}

class GrpcGeneration final : public RunningGeneration,
                             private grpc::ClientReadReactor<GenerateResponse> {
 public:
  GrpcGeneration(ferry::v1::Inference::Stub& stub, std::string address,
                 const GenerateRequest& request, absl::Duration timeout,
                 Client::OnMessage on_message, Client::OnDone on_done)
      : address_(std::move(address)),
        request_(request),
        on_message_(std::move(on_message)),
        on_done_(std::move(on_done)) {
    context_.set_deadline(DeadlineIn(timeout));
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  ~GrpcGeneration() override {
    Cancel();
    WaitUntilDone();
  }
  void Cancel() override { context_.TryCancel(); }
  absl::Status Wait() override {
    WaitUntilDone();
    return status_;
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;  // OnDone follows
    // What arrives after the cancellation is read and dropped.
    if (!refused_ && !on_message_(response_)) {
      refused_ = true;
      context_.TryCancel();
    }
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = refused_ ? CancelledByCaller() : ErrorOf(status, address_, "Generate");
    on_done_(status_);
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();  // under the lock: whoever waits may destroy this
  }
  void WaitUntilDone() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  grpc::ClientContext context_;
  const std::string address_;
  const GenerateRequest request_;
  GenerateResponse response_;
  const Client::OnMessage on_message_;
  const Client::OnDone on_done_;
  bool refused_ = false;  // gRPC's callbacks only, which come one at a time
  absl::Status status_;   // written before done_
  std::mutex mutex_;      // guards done_
  std::condition_variable changed_;
  bool done_ = false;
};

class GrpcClient final : public Client {
 public:
  GrpcClient(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
      : stub_(ferry::v1::Inference::NewStub(std::move(channel))),
        address_(options.address),
        timeout_(options.timeout) {}

  absl::Status Generate(const GenerateRequest& request, const OnMessage& on_message,
                        const CallOptions& options) override;
  std::unique_ptr<RunningGeneration> Start(const GenerateRequest& request, OnMessage on_message,
                                           OnDone on_done, const CallOptions& options) override {
    return std::make_unique<GrpcGeneration>(*stub_, address_, request,
                                            options.timeout.value_or(timeout_),
                                            std::move(on_message), std::move(on_done));
  }
  absl::StatusOr<Completion> Complete(const GenerateRequest& request,
                                      const CallOptions& options) override;
  absl::StatusOr<std::vector<uint32_t>> Tokenize(const std::string& model, const std::string& text,
                                                 bool add_special_tokens) override;
  absl::StatusOr<std::string> Detokenize(const std::string& model,
                                         const std::vector<uint32_t>& ids) override;
  absl::StatusOr<std::vector<ferry::v1::ModelCard>> ListModels() override;
  absl::Status CheckReady(const std::string& model, absl::Duration timeout) override;
  absl::Status WaitUntilReady(const std::string& model, absl::Duration timeout) override;

 private:
  absl::StatusOr<ferry::v1::ListModelsResponse> AskForModels(absl::Duration timeout,
                                                             bool wait_for_ready);

  const std::unique_ptr<ferry::v1::Inference::Stub> stub_;
  const std::string address_;
  const absl::Duration timeout_;
};

absl::Status GrpcClient::Generate(const GenerateRequest& request, const OnMessage& on_message,
                                  const CallOptions& options) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineIn(options.timeout.value_or(timeout_)));
  const auto reader = stub_->Generate(&context, request);
  GenerateResponse response;
  bool cancelled = false;
  while (reader->Read(&response)) {
    // What arrives after the cancellation is read and dropped: the call must end before we return.
    if (!cancelled && !on_message(response)) {
      cancelled = true;
      context.TryCancel();
    }
  }
  const absl::Status status = ErrorOf(reader->Finish(), address_, "Generate");
  return cancelled ? CancelledByCaller() : status;
}

absl::StatusOr<Client::Completion> GrpcClient::Complete(const GenerateRequest& request,
                                                        const CallOptions& options) {
  Completion completion;
  bool has_summary = false;
  const auto on_message = [&](const GenerateResponse& response) {
    if (response.has_summary()) {
      has_summary = true;
      completion.summary = response.summary();
    }
    if (response.index() != 0) return true;
    completion.text += response.text();
    completion.token_ids.insert(completion.token_ids.end(), response.token_ids().begin(),
                                response.token_ids().end());
    if (response.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
      completion.finish_reason = response.finish_reason();
    }
    return true;
  };
  RETURN_IF_ERROR(Generate(request, on_message, options));
  if (!has_summary) return absl::DataLossError("the stream ended without its summary");
  return completion;
}

absl::StatusOr<std::vector<uint32_t>> GrpcClient::Tokenize(const std::string& model,
                                                           const std::string& text,
                                                           bool add_special_tokens) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineIn(timeout_));
  ferry::v1::TokenizeRequest request;
  request.set_model(model);
  request.set_text(text);
  request.set_add_special_tokens(add_special_tokens);
  ferry::v1::TokenizeResponse response;
  RETURN_IF_ERROR(ErrorOf(stub_->Tokenize(&context, request, &response), address_, "Tokenize"));
  return std::vector<uint32_t>(response.ids().begin(), response.ids().end());
}

absl::StatusOr<std::string> GrpcClient::Detokenize(const std::string& model,
                                                   const std::vector<uint32_t>& ids) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineIn(timeout_));
  ferry::v1::DetokenizeRequest request;
  request.set_model(model);
  request.mutable_ids()->Add(ids.begin(), ids.end());
  ferry::v1::DetokenizeResponse response;
  RETURN_IF_ERROR(ErrorOf(stub_->Detokenize(&context, request, &response), address_, "Detokenize"));
  return response.text();
}

absl::StatusOr<ferry::v1::ListModelsResponse> GrpcClient::AskForModels(absl::Duration timeout,
                                                                       bool wait_for_ready) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineIn(timeout));
  context.set_wait_for_ready(wait_for_ready);
  ferry::v1::ListModelsResponse response;
  RETURN_IF_ERROR(ErrorOf(stub_->ListModels(&context, {}, &response), address_, "ListModels"));
  return response;
}

absl::StatusOr<std::vector<ferry::v1::ModelCard>> GrpcClient::ListModels() {
  ASSIGN_OR_RETURN(const auto response, AskForModels(timeout_, /*wait_for_ready=*/false));
  return std::vector<ferry::v1::ModelCard>(response.models().begin(), response.models().end());
}

absl::Status GrpcClient::CheckReady(const std::string& model, absl::Duration timeout) {
  const auto response = AskForModels(timeout, /*wait_for_ready=*/true);
  if (absl::IsDeadlineExceeded(response.status())) {
    return absl::DeadlineExceededError("the router does not answer");
  }
  RETURN_IF_ERROR(response.status());
  std::string missing = absl::StrCat("the router does not serve ",
                                     model.empty() ? "any model" : absl::StrCat("model ", model));
  std::vector<std::string> served;
  for (const ferry::v1::ModelCard& card : response->models()) {
    served.push_back(card.name());
    if (!model.empty() && card.name() != model) continue;
    if (card.ready()) return absl::OkStatus();
    missing = absl::StrCat(card.name(), " has ", card.ready_prefill_workers(), " prefill and ",
                           card.ready_decode_workers(), " decode workers ready");
  }
  if (std::find(served.begin(), served.end(), model) == served.end() && !served.empty() &&
      !model.empty()) {
    absl::StrAppend(&missing, ", it serves ", absl::StrJoin(served, ", "));
  }
  for (const auto* sentences : {&response->misfits(), &response->unreachable()}) {
    for (int i = 0; i < std::min(sentences->size(), kMaxSentences); ++i) {
      absl::StrAppend(&missing, "; ", sentences->Get(i));
    }
  }
  return response->misfits().empty() ? absl::UnavailableError(missing)
                                     : absl::FailedPreconditionError(missing);
}

absl::Status GrpcClient::WaitUntilReady(const std::string& model, absl::Duration timeout) {
  const absl::Time deadline = steady_time::Now() + timeout;
  std::string last = "the router does not answer";
  while (steady_time::Now() < deadline) {
    const absl::Status ready = CheckReady(model, deadline - steady_time::Now());
    switch (ready.code()) {
      case absl::StatusCode::kDeadlineExceeded:
        break;  // while it was asked: the last answer says more
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kFailedPrecondition:
        last = std::string(ready.message());
        break;
      default:  // OK, or no router
        return ready;
    }
    std::this_thread::sleep_for(
        absl::ToChronoMilliseconds(std::min(kReadyPollInterval, deadline - steady_time::Now())));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("not ready after ", absl::FormatDuration(timeout), ": ", last));
}

}  // namespace

absl::Duration RetryAfter(const absl::Status& error) { return status::RetryAfter(error); }

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const ClientOptions& options) {
  if (options.address.empty()) return absl::InvalidArgumentError("address is empty");
  if (options.max_attempts < 1 || options.max_attempts > kMaxAttempts) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_attempts is ", options.max_attempts, ", it must be 1 to ", kMaxAttempts));
  }
  if (options.first_backoff < absl::Milliseconds(1) ||
      options.first_backoff > absl::Seconds(kMaxBackoffS)) {
    return absl::InvalidArgumentError(absl::StrCat("first_backoff is ",
                                                   absl::FormatDuration(options.first_backoff),
                                                   ", it must be 1ms to ", kMaxBackoffS, "s"));
  }
  ASSIGN_OR_RETURN(const auto credentials, MakeCredentials(options));
  grpc::ChannelArguments arguments;
  if (options.max_attempts > 1) {
    arguments.SetServiceConfigJSON(RetryPolicy(options));
    // A request that gRPC cannot keep is not made again; by default it keeps 256 KiB.
    arguments.SetInt(GRPC_ARG_PER_RPC_RETRY_BUFFER_SIZE, kMaxMessageBytes);
  } else {
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  }
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepalivePingMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  // Two clients of one process do not share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return std::make_unique<GrpcClient>(
      grpc::CreateCustomChannel(options.address, credentials, arguments), options);
}

}  // namespace ferry

#include "cli/grpc_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/router_flags.h"
#include "ferry/v1/inference.pb.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"

namespace cli {
namespace {

class ClientBackend final : public GrpcBackend {
 public:
  ClientBackend(const GrpcBackendOptions& options, std::unique_ptr<ferry::Client> client,
                ferry::v1::ModelCard model)
      : options_(options), client_(std::move(client)), model_(std::move(model)) {}

  const ferry::v1::ModelCard& model() const override { return model_; }

  absl::StatusOr<LoadAnswer> Send(const LoadRequest& load,
                                  const std::function<void(uint32_t)>& on_output) override {
    if (!load.prompt.messages.empty()) {
      return absl::InvalidArgumentError(
          "messages are for --backend openai; over gRPC a prompt is text or token ids");
    }
    ferry::v1::GenerateRequest request;
    request.set_model(model_.name());
    if (load.prompt.ids.empty()) {
      request.set_text(load.prompt.text);
    } else {
      request.mutable_tokens()->mutable_ids()->Add(load.prompt.ids.begin(), load.prompt.ids.end());
    }
    ferry::v1::SamplingParams& sampling = *request.mutable_sampling();
    sampling.set_temperature(static_cast<float>(options_.temperature));
    sampling.set_max_tokens(load.output_tokens);
    sampling.set_ignore_eos(options_.ignore_eos);
    sampling.set_seed(load.seed);
    LoadAnswer answer;
    const auto on_message = [&](const ferry::v1::GenerateResponse& response) {
      if (response.token_ids_size() > 0) {
        on_output(response.token_ids_size());
        answer.output_ids.insert(answer.output_ids.end(), response.token_ids().begin(),
                                 response.token_ids().end());
      }
      if (response.has_summary()) {
        answer.prompt_tokens = response.summary().prompt_tokens();
        answer.cached_tokens = response.summary().cached_tokens();
        answer.kv_bytes = response.summary().kv_bytes();
      }
      return true;
    };
    const absl::Time started = steady_time::Now();
    const absl::Status status =
        client_->Generate(request, on_message, {.timeout = options_.request_timeout});
    // The router's own deadline may have passed, too.
    if (absl::IsDeadlineExceeded(status) &&
        steady_time::Now() - started >= options_.request_timeout) {
      return RequestTimedOut(options_.request_timeout);
    }
    RETURN_IF_ERROR(status);
    answer.output_tokens = static_cast<uint32_t>(answer.output_ids.size());
    return answer;
  }

 private:
  const GrpcBackendOptions options_;
  const std::unique_ptr<ferry::Client> client_;
  const ferry::v1::ModelCard model_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcBackend>> GrpcBackend::Connect(
    const GrpcBackendOptions& options) {
  GrpcBackendOptions once = options;
  once.client.max_attempts = 1;  // what is measured is one attempt
  ASSIGN_OR_RETURN(auto client, ferry::Client::Create(once.client));
  RETURN_IF_ERROR(
      ExplainConnection(client->WaitUntilReady(once.model, once.ready_timeout), once.client));
  ASSIGN_OR_RETURN(const auto models, client->ListModels());
  for (const ferry::v1::ModelCard& card : models) {
    if (once.model.empty() ? models.size() == 1 : card.name() == once.model) {
      return std::make_unique<ClientBackend>(once, std::move(client), card);
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the router serves ", models.size(), " models: choose one with --model"));
}

}  // namespace cli

#include "tests/router/router_fixture.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "block_hash/block_hash.h"
#include "grpcpp/channel.h"
#include "prometheus/text_serializer.h"
#include "status/grpc_status.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);
constexpr int32_t kVocabSize = 300;  // 256 bytes and some ids without text
constexpr int32_t kEos = 1;

std::unique_ptr<ModelAssets> MakeAssets(const std::string& name) {
  auto assets = std::make_unique<ModelAssets>();
  assets->name = name;
  assets->tokenizer = tokenizer::Make(tokenizer::TinyTokenizer());
  assets->tokenizer_hash = assets->tokenizer->hash();
  assets->vocab_size = kVocabSize;
  assets->max_position_embeddings = 4096;
  assets->eos_ids = {kEos};
  assets->longest_token_bytes = 1;
  return assets;
}

Answer Read(ferry::v1::Inference::Stub* stub, grpc::ClientContext* context,
            const ferry::v1::GenerateRequest& request, std::atomic<int>* messages, bool read) {
  Answer answer;
  const auto reader = stub->Generate(context, request);
  ferry::v1::GenerateResponse message;
  while (read && reader->Read(&message)) {
    answer.summary_was_last = message.has_summary();
    if (message.has_summary()) {
      ++answer.num_summaries;
      answer.summary = message.summary();
    }
    answer.texts[message.index()] += message.text();
    for (const uint32_t id : message.token_ids()) answer.tokens[message.index()].push_back(id);
    if (message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
      answer.reasons[message.index()] = message.finish_reason();
    }
    if (message.index() == 0) {
      for (const auto& position : message.logprobs()) answer.logprobs.push_back(position);
    }
    ++*messages;
    messages->notify_all();
  }
  answer.status = status::FromGrpc(reader->Finish());
  return answer;
}

}  // namespace

RunningCall::RunningCall(ferry::v1::Inference::Stub* stub, ferry::v1::GenerateRequest request,
                         absl::Duration timeout, bool read) {
  if (timeout != absl::InfiniteDuration()) {
    context_.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  }
  result_ = std::async(std::launch::async, [this, stub, request = std::move(request), read] {
    return Read(stub, &context_, request, &messages_, read);
  });
}

RunningCall::~RunningCall() {
  if (result_.valid()) {
    context_.TryCancel();
    result_.wait();
  }
}

void FailDecodes(fakes::FakeWorker* worker, Failing* failing, bool accept_first) {
  worker->on_decode = [worker, failing, accept_first](std::shared_ptr<fakes::DecodeCall> call) {
    if (failing->left.fetch_sub(1) <= 0) return worker->DefaultDecode(call);
    if (accept_first) call->Accept();
    call->End(failing->status);
  };
}

void FailPrefills(fakes::FakeWorker* worker, Failing* failing, bool start_first) {
  worker->on_prefill = [worker, failing, start_first](std::shared_ptr<fakes::PrefillCall> call) {
    if (failing->left.fetch_sub(1) <= 0) return worker->DefaultPrefill(call);
    if (start_first) {
      call->Accept();
      call->Started();
    }
    call->End(failing->status);
  };
}

RouterFixture::RouterFixture() {
  options_.model_assets = {"unused"};
  options_.heartbeat = absl::Milliseconds(400);
  options_.worker_wait = absl::Milliseconds(800);
  options_.local_prefill_tokens = 64;
  options_.breaker_failures = 0;  // tests of retries fail workers as they like
}

RouterFixture::~RouterFixture() {
  if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
  if (router_ != nullptr) router_->Stop();
  server_.reset();
  service_.reset();
  door_.reset();
  router_.reset();
}

fakes::FakeWorker* RouterFixture::Add(ferry::v1::WorkerRole role) {
  fakes::FakeWorker::Options options;
  options.role = role;
  return Add(options);
}

fakes::FakeWorker* RouterFixture::Add(const fakes::FakeWorker::Options& options) {
  workers_.push_back(std::make_unique<fakes::FakeWorker>(options, &directory_));
  options_.workers.push_back(workers_.back()->address());
  return workers_.back().get();
}

void RouterFixture::StartRouterAlone() {
  ASSERT_EQ(options_.Validate(), absl::OkStatus());
  std::vector<std::unique_ptr<ModelAssets>> assets;
  for (const std::string& name : models_) assets.push_back(MakeAssets(name));
  router_ = std::make_unique<Router>(options_, std::move(assets), metrics_.get());
  door_ = std::make_unique<FrontDoor>(router_.get());
  service_ = GenerateService::Create(door_.get());
  auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {service_->grpc_service()});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = std::move(*server);
  router_->Start([this](bool ready) {
    ready_ = ready;
    readiness_ = router_->CheckReady();
    server_->SetReady(ready);
  });
  stub_ = ferry::v1::Inference::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", server_->port()), {}));
}

void RouterFixture::StartRouter() {
  ASSERT_NO_FATAL_FAILURE(StartRouterAlone());
  ASSERT_TRUE(Eventually([this] {
    for (WorkerSlot slot = 0; slot < router_->registry().num_workers(); ++slot) {
      if (router_->registry().link(slot).state() != LinkState::kServing) return false;
    }
    return router_->index().num_untrusted(EventLoop::Now()) == 0;
  }));
}

bool RouterFixture::WaitForWorkers(uint32_t prefill, uint32_t decode) {
  return Eventually([&] {
    const auto ready = router_->registry().ReadyWorkers(*router_->models().all().front());
    return ready.prefill == static_cast<int32_t>(prefill) &&
           ready.decode == static_cast<int32_t>(decode);
  });
}

bool RouterFixture::Eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < end) {
    // Every look is one more timer of the loop, so that it is not kept busy.
    std::promise<bool> result;
    router_->loop()->Post([&] {
      router_->loop()->After(absl::Milliseconds(2), [&] { result.set_value(condition()); });
    });
    if (result.get_future().get()) return true;
  }
  return false;
}

ferry::v1::GenerateRequest RouterFixture::Text(const std::string& text, uint32_t max_tokens) {
  ferry::v1::GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  return request;
}

ferry::v1::GenerateRequest RouterFixture::Tokens(int n, uint32_t first, uint32_t max_tokens) {
  ferry::v1::GenerateRequest request;
  for (int i = 0; i < n; ++i) {
    request.mutable_tokens()->add_ids((first + static_cast<uint32_t>(i) / 64) % kVocabSize);
  }
  request.mutable_sampling()->set_max_tokens(max_tokens);
  return request;
}

ferry::v1::ListModelsResponse RouterFixture::ListModels() {
  grpc::ClientContext context;
  ferry::v1::ListModelsResponse response;
  EXPECT_TRUE(stub_->ListModels(&context, {}, &response).ok());
  return response;
}

Answer RouterFixture::Generate(const ferry::v1::GenerateRequest& request, absl::Duration timeout) {
  return Start(request, timeout)->Wait();
}

std::unique_ptr<RunningCall> RouterFixture::Start(const ferry::v1::GenerateRequest& request,
                                                  absl::Duration timeout, bool read) {
  return std::make_unique<RunningCall>(stub_.get(), request, timeout, read);
}

std::vector<block_hash::BlockHash> RouterFixture::ChainOf(
    const ferry::v1::GenerateRequest& request) const {
  const ModelAssets& model = *router_->models().all().front();
  const block_hash::BlockHasher hasher(options_.hash_seed);
  const std::vector<int32_t> tokens(request.tokens().ids().begin(), request.tokens().ids().end());
  return hasher.Chain(
      hasher.Root(block_hash::MakeNamespace(model.name, model.tokenizer_hash, request.cache_salt(),
                                            request.tenant())),
      tokens, 64);
}

std::string RouterFixture::Metric(const std::string& name) const {
  const std::string text = "\n" + prometheus::TextSerializer().Serialize(metrics_->Collect());
  const size_t at = text.find("\n" + name + " ");
  if (at == text.npos) return "";
  const size_t begin = at + name.size() + 2;
  return text.substr(begin, text.find('\n', begin) - begin);
}

bool RouterFixture::IsIdle() {
  return Eventually(
      [this] { return router_->num_running() == 0 && router_->ledger().num_charges() == 0; });
}

}  // namespace router

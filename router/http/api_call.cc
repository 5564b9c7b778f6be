#include "router/http/api_call.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ferry/v1/inference.pb.h"
#include "router/http/answer.h"
#include "router/http/api_error.h"

namespace router::http {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;

// What is put behind x-request-id for each of several prompts: "-1023".
constexpr size_t kMaxSuffixBytes = 5;

class ApiCall final : public Exchange::Watcher, public std::enable_shared_from_this<ApiCall> {
 public:
  ApiCall(Api api, FrontDoor* door, const std::string& tenant, std::shared_ptr<Exchange> exchange)
      : api_(api),
        door_(door),
        tenant_(tenant),
        client_calls_(door->router()->client_calls()),
        exchange_(std::move(exchange)) {
    client_calls_->Add();
    arrival_.time = EventLoop::Now();
    arrival_.deadline = arrival_.time + door_->router()->default_deadline();
    const std::string_view sent = exchange_->request().Header(tracing::kTraceparent);
    arrival_.trace = tracing::BeginSpan({sent.data(), sent.size()}, door_->router()->trace_ratio());
  }
  ~ApiCall() override { client_calls_->Done(); }

  void Start() {
    exchange_->Watch(shared_from_this());
    const std::string named(exchange_->request().Header("x-request-id"));
    absl::Status status = CheckRequestId(named);
    request_id_ = named.empty() || !status.ok() ? NewRequestId() : named;
    if (status.ok()) {
      status = door_->Run(exchange_->request().body.size(),
                          [self = shared_from_this()] { self->ReadRequest(); });
    }
    if (!status.ok()) Refuse(status);
  }

  // Watcher
  void OnClientGone() override {
    done_ = true;
    CancelParts();
  }
  void OnTaken() override {
    door_->router()->loop()->Post([self = shared_from_this()] {
      for (const int64_t number : self->numbers_) self->door_->router()->OnClientDrained(number);
    });
  }

 private:
  // A prompt's generation as its client.  On the loop's thread.
  class Part final : public ClientStream {
   public:
    Part(std::shared_ptr<ApiCall> call, size_t index) : call_(std::move(call)), index_(index) {}

    void Write(const GenerateResponse& message) override {
      const size_t num_bytes = message.ByteSizeLong();
      call_->posted_bytes_ += num_bytes;
      call_->exchange_->Post([call = call_, index = index_, num_bytes, message] {
        call->posted_bytes_ -= num_bytes;
        call->OnMessage(index, message);
      });
    }
    void Finish(const absl::Status& status) override {
      call_->exchange_->Post([call = call_, index = index_, status] {
        call->OnPartEnd(status.ok() || call->numbers_.size() == 1 ? status
                                                                  : OfPrompt(index, status));
      });
    }
    size_t pending_bytes() const override {
      return call_->posted_bytes_.load() + call_->exchange_->unsent_bytes();
    }
    bool gone() const override { return call_->gone_; }

   private:
    const std::shared_ptr<ApiCall> call_;
    const size_t index_;
  };

  // The strand, or a thread of the pool: nobody else knows of request_ yet.
  void ReadRequest() {
    const std::string body = exchange_->TakeBody();
    absl::StatusOr<ApiRequest> request = ClientHasGone();
    if (!gone_) {
      request = api_ == Api::kChat ? ParseChatRequest(body, door_->router()->models())
                                   : ParseCompletionRequest(body);
    }
    if (!request.ok()) {
      exchange_->Post(
          [self = shared_from_this(), status = request.status()] { self->Refuse(status); });
      return;
    }
    request_ = std::move(*request);
    for (size_t i = 0; i < request_.prompts.size(); ++i) {
      request_.prompts[i]->set_request_id(
          request_.prompts.size() == 1 ? request_id_ : absl::StrCat(request_id_, "-", i));
      request_.prompts[i]->set_tenant(tenant_);
    }
    exchange_->Post([self = shared_from_this()] { self->EnterParts(); });
  }

  void EnterParts() {
    absl::Status status = done_ ? ClientHasGone() : door_->Check(*request_.prompts.front());
    if (!status.ok()) {
      Refuse(status);
      return;
    }
    const auto& model = door_->router()->models().Find(request_.prompts.front()->model());
    answer_ = Answer::Create(request_, {.request_id = request_id_,
                                        .model = model.ok() ? (*model)->name : "",
                                        .created = absl::ToUnixSeconds(absl::Now())});
    open_parts_ = request_.prompts.size();
    for (size_t i = 0; i < open_parts_; ++i) numbers_.push_back(door_->router()->NextNumber());
    // The prompts are not kept: an answer may take long.
    const std::vector<std::shared_ptr<GenerateRequest>> prompts = std::move(request_.prompts);
    std::vector<FrontDoor::Entry> entries;
    for (size_t i = 0; i < prompts.size(); ++i) {
      FrontDoor::Arrival arrival = arrival_;
      arrival.number = numbers_[i];
      arrival.text = request_.text;
      // Of several prompts the first one's span is the parent.
      if (i > 0) arrival.trace = tracing::BeginSpan(tracing::Traceparent(arrival.trace));
      entries.push_back({arrival, prompts[i], std::make_shared<Part>(shared_from_this(), i)});
    }
    door_->Enter(std::move(entries));
  }

  static absl::Status ClientHasGone() { return absl::CancelledError("the client has gone"); }

  // Of a request that no generation has come of.
  void Refuse(const absl::Status& status) {
    door_->NoteRefusal(arrival_, request_id_, ForLog(status));
    if (!done_) Fail(status);
  }

  void OnMessage(size_t index, const GenerateResponse& message) {
    if (done_) return;
    const std::string events = answer_->Add(index, message);
    if (!request_.stream) return;
    if (!std::exchange(begun_, true)) {
      exchange_->BeginStream(
          {.content_type = "text/event-stream; charset=utf-8", .headers = ResponseHeaders()});
    }
    exchange_->Write(events);
  }

  void OnPartEnd(const absl::Status& status) {
    if (done_) return;
    if (!status.ok()) {
      Fail(status);
      return;
    }
    if (--open_parts_ > 0) return;
    done_ = true;
    if (request_.stream) {
      exchange_->Write(answer_->Finish());
      exchange_->EndStream(/*complete=*/true);
    } else {
      exchange_->Respond({.headers = ResponseHeaders(), .body = answer_->Finish()});
    }
  }

  void Fail(const absl::Status& status) {
    done_ = true;
    if (begun_) {
      exchange_->Write(ErrorEvent(status));
      exchange_->EndStream(/*complete=*/false);
    } else {
      Response response = ErrorResponse(status);
      for (auto& header : ResponseHeaders()) response.headers.push_back(std::move(header));
      exchange_->Respond(response);
    }
    CancelParts();
  }

  // Of every response, so that it is neither stored nor held back on its way, and can be found
  // again.
  Headers ResponseHeaders() const {
    return {{"cache-control", "no-cache"},
            {"x-accel-buffering", "no"},
            {"x-request-id", request_id_},
            {tracing::kTraceparent, tracing::Traceparent(arrival_.trace)}};
  }

  void CancelParts() {
    gone_ = true;  // at once: its text may be waiting to be read
    door_->router()->loop()->Post([self = shared_from_this()] {
      for (const int64_t number : self->numbers_) self->door_->router()->OnClientGone(number);
    });
  }

  const Api api_;
  FrontDoor* const door_;
  const std::string tenant_;
  const std::shared_ptr<OutstandingCalls> client_calls_;
  const std::shared_ptr<Exchange> exchange_;
  FrontDoor::Arrival arrival_;
  std::string request_id_;
  ApiRequest request_;
  std::vector<int64_t> numbers_;         // of the generations, by prompt
  std::atomic<size_t> posted_bytes_{0};  // of messages on their way to the strand
  std::atomic<bool> gone_{false};        // nobody waits for what is still to be done
  // The strand only.
  std::unique_ptr<Answer> answer_;
  size_t open_parts_ = 0;
  bool begun_ = false;  // the head of a stream is written
  bool done_ = false;   // nothing more is said
};

}  // namespace

absl::Status CheckRequestId(const std::string& id) {
  return CheckName("x-request-id", id, kMaxNameBytes - kMaxSuffixBytes);
}

void StartApiCall(Api api, FrontDoor* door, const std::string& tenant,
                  std::shared_ptr<Exchange> exchange) {
  std::make_shared<ApiCall>(api, door, tenant, std::move(exchange))->Start();
}

}  // namespace router::http

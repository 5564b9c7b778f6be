#include "cli/openai_backend.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cli/sse_reader.h"
#include "curl_handle/curl_handle.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"

namespace cli {
namespace {

using nlohmann::json;

// A body may end a little behind its last event, and the connection is of use then; a server that
// holds it open costs no more than this.
constexpr absl::Duration kBodyEnd = absl::Milliseconds(20);
constexpr absl::Duration kReadyPollInterval = absl::Milliseconds(200);
constexpr size_t kMaxErrorBytes = 1 << 20;  // of an answer that is no stream
constexpr size_t kMaxShownBytes = 300;
constexpr uint32_t kMostTokens = 1 << 24;  // more is no count: as if it were not told

absl::StatusCode CodeOf(long http) {
  switch (http) {
    case 400:
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 403:
      return absl::StatusCode::kPermissionDenied;
    case 404:
      return absl::StatusCode::kNotFound;
    case 429:
      return absl::StatusCode::kResourceExhausted;
    case 503:
      return absl::StatusCode::kUnavailable;
    case 504:
      return absl::StatusCode::kDeadlineExceeded;
    default:
      return absl::StatusCode::kInternal;
  }
}

// The message of an error in OpenAI's shape, or what else there is.
std::string ErrorMessage(const std::string& body) {
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_object() && parsed.contains("error")) {
    const json& error = parsed["error"];
    if (error.is_object() && error.contains("message") && error["message"].is_string())
      return error["message"];
    return error.dump();
  }
  return body.substr(0, kMaxShownBytes);
}

// An answer as it arrives.
struct Stream {
  const std::function<void(uint32_t)>* on_output = nullptr;  // null: no stream is expected
  CURL* curl = nullptr;
  SseReader events = {};
  std::string body = {};  // of what is no stream
  LoadAnswer answer = {};
  absl::Status failure = {};
  bool done = false;
  absl::Duration stall_timeout = absl::InfiniteDuration();
  absl::Time last_output = absl::InfiniteFuture();  // none yet
};

std::optional<uint32_t> Count(const json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_number_unsigned() || *found > kMostTokens) return {};
  return found->get<uint32_t>();
}

void TakeUsage(const json& usage, LoadAnswer* answer) {
  answer->output_tokens = Count(usage, "completion_tokens");
  answer->prompt_tokens = Count(usage, "prompt_tokens");
  if (const auto details = usage.find("prompt_tokens_details");
      details != usage.end() && details->is_object()) {
    answer->cached_tokens = Count(*details, "cached_tokens");
  }
}

bool HasText(const json& choice, const char* field) {
  const auto found = choice.find(field);
  return found != choice.end() &&
         ((found->is_string() && !found->get_ref<const std::string&>().empty()) ||
          (found->is_array() && !found->empty()));
}

void TakeEvent(std::string_view data, Stream* stream) {
  if (data == "[DONE]") {
    stream->done = true;
    return;
  }
  const json event = json::parse(data, nullptr, /*allow_exceptions=*/false);
  if (!event.is_object()) {
    stream->failure = absl::DataLossError(
        absl::StrCat("an event is no JSON object: ", std::string(data.substr(0, kMaxShownBytes))));
    return;
  }
  if (event.contains("error")) {
    stream->failure =
        absl::InternalError(absl::StrCat("in the stream: ", ErrorMessage(std::string(data))));
    return;
  }
  if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
    TakeUsage(*usage, &stream->answer);
  }
  const auto choices = event.find("choices");
  if (choices == event.end() || !choices->is_array() || choices->empty() ||
      !choices->front().is_object())
    return;
  const json& choice = choices->front();
  const json delta = choice.value("delta", json::object());
  if (HasText(choice, "text") || HasText(delta, "content") || HasText(delta, "reasoning_content") ||
      HasText(delta, "tool_calls")) {
    stream->last_output = steady_time::Now();
    (*stream->on_output)(1);
  }
}

// A handle with the connection that it keeps.
struct Line {
  curl_handle::Multi connection;
  curl_handle::Handle handle;
};

// Runs the call of `line` to its end, or until its stream is done.
CURLcode Perform(const Line& line, const Stream& stream) {
  constexpr absl::Duration kTick = absl::Seconds(1);  // how often OnProgress looks at least
  CURLM* const multi = line.connection.get();
  CURLMcode ok = curl_multi_add_handle(multi, line.handle.get());
  absl::Time body_end = absl::InfiniteFuture();
  for (int running = 1; ok == CURLM_OK;) {
    ok = curl_multi_perform(multi, &running);
    if (ok != CURLM_OK || running == 0) break;
    if (stream.done) body_end = std::min(body_end, steady_time::Now() + kBodyEnd);
    const absl::Duration left = body_end - steady_time::Now();
    if (left <= absl::ZeroDuration()) break;
    const int64_t ms = absl::ToInt64Milliseconds(std::min(left, kTick));
    ok = curl_multi_poll(multi, nullptr, 0, static_cast<int>(ms) + 1, nullptr);
  }
  CURLcode code = stream.done ? CURLE_OK : CURLE_FAILED_INIT;
  int left = 0;
  while (const CURLMsg* const message = curl_multi_info_read(multi, &left)) {
    if (message->msg == CURLMSG_DONE) code = message->data.result;
  }
  curl_multi_remove_handle(multi, line.handle.get());
  return code;
}

// Once a second at least.  Not 0: the call ends.
int OnProgress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  auto* stream = static_cast<Stream*>(user);
  if (!stream->failure.ok()) return 1;
  if (stream->done || steady_time::Now() - stream->last_output <= stream->stall_timeout) return 0;
  stream->failure = absl::DeadlineExceededError(
      absl::StrCat("the answer stalled: no output for ",
                   absl::FormatDuration(stream->stall_timeout), " (--stall_timeout_s)"));
  return 1;
}

size_t OnBytes(char* bytes, size_t, size_t size, void* user) {
  auto* stream = static_cast<Stream*>(user);
  long status = 0;
  curl_easy_getinfo(stream->curl, CURLINFO_RESPONSE_CODE, &status);
  if (status == 200 && stream->on_output != nullptr) {
    const bool fits = stream->events.Add({bytes, size}, [stream](std::string_view data) {
      if (stream->failure.ok()) TakeEvent(data, stream);
    });
    if (!fits) {
      stream->failure = absl::DataLossError(
          absl::StrCat("an event has more than ", SseReader::kMaxEventBytes, " bytes"));
      return 0;  // ends the call
    }
  } else if (stream->body.size() + size <= kMaxErrorBytes) {
    stream->body.append(bytes, size);
  }
  return size;
}

class Connections final : public OpenAiBackend {
 public:
  explicit Connections(const OpenAiOptions& options) : options_(options) {
    const absl::string_view url = absl::StripSuffix(options.base_url, "/");
    base_ = absl::StrCat(url, absl::EndsWith(url, "/v1") ? "" : "/v1");
  }

  // Asks until the model is listed; a server that starts may not listen yet, or say that it is
  // away.
  absl::Status WaitForModel() {
    const absl::Time deadline = steady_time::Now() + options_.ready_timeout;
    for (;;) {
      const absl::Status found = FindModel(deadline - steady_time::Now());
      if (!absl::IsUnavailable(found) && !absl::IsInternal(found)) return found;
      const absl::Duration left = deadline - steady_time::Now();
      if (left <= absl::ZeroDuration()) return found;
      std::this_thread::sleep_for(absl::ToChronoNanoseconds(std::min(kReadyPollInterval, left)));
    }
  }

  const std::string& model() const override { return options_.model; }
  std::optional<uint32_t> vocab_size() const override { return vocab_size_; }

  absl::StatusOr<LoadAnswer> Send(const LoadRequest& request,
                                  const std::function<void(uint32_t)>& on_output) override {
    json body = {{"model", options_.model},
                 {"max_tokens", request.output_tokens},
                 {"temperature", options_.temperature},
                 {"seed", request.seed},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
    if (options_.ignore_eos) body["ignore_eos"] = true;
    const bool chat = !request.prompt.messages.empty();
    if (chat) {
      body["messages"] = json::parse(request.prompt.messages);
    } else if (request.prompt.ids.empty()) {
      body["prompt"] = request.prompt.text;
    } else {
      body["prompt"] = request.prompt.ids;
    }
    Stream stream;
    stream.on_output = &on_output;
    stream.stall_timeout = options_.stall_timeout;
    const absl::Status called = Call(chat ? "/chat/completions" : "/completions",
                                     body.dump(-1, ' ', false, json::error_handler_t::replace),
                                     options_.request_timeout, &stream);
    RETURN_IF_ERROR(stream.failure);
    RETURN_IF_ERROR(called);
    if (!stream.done) return absl::DataLossError("the stream ended without [DONE]");
    return std::move(stream.answer);
  }

 private:
  absl::Status FindModel(absl::Duration timeout) {
    Stream stream;
    const absl::Status called = Call("/models", "", timeout, &stream);
    if (!called.ok()) {
      return absl::Status(called.code(),
                          absl::StrCat(base_, "/models: ", std::string(called.message())));
    }
    const json parsed = json::parse(stream.body, nullptr, /*allow_exceptions=*/false);
    std::vector<std::string> names;
    std::vector<std::optional<uint32_t>> vocab_sizes;  // of the names
    if (parsed.is_object() && parsed.contains("data") && parsed["data"].is_array()) {
      for (const json& model : parsed["data"]) {
        if (!model.is_object() || !model.contains("id") || !model["id"].is_string()) continue;
        names.push_back(model["id"]);
        vocab_sizes.push_back(Count(model, "vocab_size"));
      }
    }
    if (options_.model.empty() && names.size() == 1) options_.model = names.front();
    if (const auto found = std::find(names.begin(), names.end(), options_.model);
        found != names.end()) {
      vocab_size_ = vocab_sizes[found - names.begin()];
      if (vocab_size_ == 0) vocab_size_.reset();
      return absl::OkStatus();
    }
    if (names.empty()) return absl::UnavailableError(absl::StrCat(base_, " serves no model"));
    return absl::NotFoundError(
        absl::StrCat(base_, " serves ", absl::StrJoin(names, ", "), ": ",
                     options_.model.empty() ? "choose one with --model" : "not " + options_.model));
  }

  // GETs without a body, else POSTs it; `stream` receives the answer.
  absl::Status Call(const std::string& path, const std::string& body, absl::Duration timeout,
                    Stream* stream) {
    Line line = Take();
    if (line.handle == nullptr || line.connection == nullptr) {
      return absl::InternalError("libcurl gives no handle");
    }
    CURL* curl = line.handle.get();
    stream->curl = curl;
    curl_handle::List headers;
    const auto add_header = [&headers](const std::string& header) {
      headers = curl_handle::List(curl_slist_append(headers.release(), header.c_str()));
    };
    add_header("Content-Type: application/json");
    add_header("Expect:");  // no question before a long body
    if (!options_.api_key.empty()) add_header("Authorization: Bearer " + options_.api_key);
    curl_easy_setopt(curl, CURLOPT_URL, (base_ + path).c_str());
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TCP_NODELAY, 1L);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
    curl_easy_setopt(
        curl, CURLOPT_TIMEOUT_MS,
        static_cast<long>(absl::ToInt64Milliseconds(
            std::clamp(timeout, absl::Milliseconds(1), absl::Hours(24)))));  // 0 would be no limit
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, &OnBytes);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, stream);
    if (stream->on_output != nullptr) {
      curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
      curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, &OnProgress);
      curl_easy_setopt(curl, CURLOPT_XFERINFODATA, stream);
    }
    char said[CURL_ERROR_SIZE] = "";
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, said);
    for (const auto& [option, file] : {std::pair{CURLOPT_CAINFO, &options_.tls_ca_file},
                                       std::pair{CURLOPT_SSLCERT, &options_.tls_cert_file},
                                       std::pair{CURLOPT_SSLKEY, &options_.tls_key_file}}) {
      if (!file->empty()) curl_easy_setopt(curl, option, file->c_str());
    }
    if (!body.empty()) {
      curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
      curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.data());
    }
    const CURLcode code = Perform(line, *stream);
    if (code == CURLE_OPERATION_TIMEDOUT && stream->on_output != nullptr) {
      return RequestTimedOut(timeout);
    }
    if (code != CURLE_OK) return Failure(code, said[0] == '\0' ? curl_easy_strerror(code) : said);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    GiveBack(std::move(line));
    if (status == 200) return absl::OkStatus();
    return absl::Status(CodeOf(status),
                        absl::StrCat("HTTP ", status, ": ", ErrorMessage(stream->body)));
  }

  static absl::Status Failure(CURLcode code, const std::string& said) {
    switch (code) {
      case CURLE_OPERATION_TIMEDOUT:
        return absl::DeadlineExceededError(said);
      case CURLE_URL_MALFORMAT:
      case CURLE_UNSUPPORTED_PROTOCOL:
      case CURLE_SSL_CACERT_BADFILE:
      case CURLE_SSL_CERTPROBLEM:
        return absl::InvalidArgumentError(said);
      default:
        return absl::UnavailableError(said);
    }
  }

  // The one used last is the one taken next.
  Line Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) {
      return {.connection = curl_handle::Multi(curl_multi_init()),
              .handle = curl_handle::Handle(curl_easy_init())};
    }
    Line line = std::move(idle_.back());
    idle_.pop_back();
    return line;
  }
  void GiveBack(Line line) {
    curl_easy_reset(line.handle.get());
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(line));
  }

  OpenAiOptions options_;
  std::string base_;
  std::optional<uint32_t> vocab_size_;
  std::mutex mutex_;  // guards idle_
  std::vector<Line> idle_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OpenAiBackend>> OpenAiBackend::Connect(
    const OpenAiOptions& options) {
  RETURN_IF_ERROR(curl_handle::Start());
  auto connections = std::make_unique<Connections>(options);
  RETURN_IF_ERROR(connections->WaitForModel());
  return connections;
}

}  // namespace cli

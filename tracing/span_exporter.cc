#include "tracing/span_exporter.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "curl_handle/curl_handle.h"

namespace tracing {
namespace {

constexpr size_t kMaxBatch = 512;
constexpr absl::Duration kLastTry = absl::Seconds(1);

// The answer's body is of no interest.
size_t Ignore(char*, size_t size, size_t count, void*) { return size * count; }

// Asked about once a second, and whenever something moves.
int IsCutShort(void* cut_short, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return *static_cast<std::atomic<bool>*>(cut_short) ? 1 : 0;
}

class CurlExporter final : public SpanExporter {
 public:
  explicit CurlExporter(const Options& options)
      : options_(options),
        url_(absl::StrCat(absl::StripSuffix(options.endpoint, "/"), "/v1/traces")),
        curl_(curl_easy_init()),
        headers_(curl_slist_append(nullptr, "Content-Type: application/json")),
        thread_([this] { Main(); }) {}

  ~CurlExporter() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      cut_short_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void Export(std::vector<Span> spans) override {
    const std::lock_guard lock(mutex_);
    const bool was_empty = queue_.empty();
    for (Span& span : spans) {
      if (queue_.size() >= options_.max_queue) {
        ++dropped_;
      } else {
        queue_.push_back(std::move(span));
      }
    }
    if (was_empty) changed_.notify_all();
  }

  int64_t num_exported() const override { return exported_; }
  int64_t num_dropped() const override { return dropped_; }

 private:
  enum class Outcome { kTaken, kRefused, kLater };

  void Main() {
    absl::Duration back_off = options_.first_back_off;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const size_t count = std::min(queue_.size(), kMaxBatch);
      // They keep their places, so that what comes meanwhile is bounded with them.
      const std::vector<Span> batch(queue_.begin(), queue_.begin() + count);
      const bool last = stopping_;
      if (last) cut_short_ = false;
      lock.unlock();
      const Outcome outcome = Send(ToOtlpJson(options_, batch), last ? kLastTry : options_.timeout);
      lock.lock();
      if (outcome == Outcome::kLater) {
        if (last) {
          dropped_ += static_cast<int64_t>(queue_.size());
          return;
        }
        changed_.wait_for(lock, absl::ToChronoMilliseconds(back_off), [this] { return stopping_; });
        back_off = std::min(2 * back_off, options_.max_back_off);
        continue;
      }
      back_off = options_.first_back_off;
      queue_.erase(queue_.begin(), queue_.begin() + count);
      (outcome == Outcome::kTaken ? exported_ : dropped_) += static_cast<int64_t>(count);
    }
  }

  Outcome Send(const std::string& body, absl::Duration timeout) {
    CURL* const curl = curl_.get();
    curl_easy_setopt(curl, CURLOPT_URL, url_.c_str());
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers_.get());
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.data());
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, Ignore);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS,
                     static_cast<long>(absl::ToInt64Milliseconds(timeout)));
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);  // there are other threads
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &cut_short_);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, IsCutShort);
    const CURLcode code = curl_easy_perform(curl);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    std::string trouble;
    if (code != CURLE_OK) {
      trouble = curl_easy_strerror(code);
    } else if (status < 200 || status > 299) {
      trouble = absl::StrCat("HTTP status ", status);
    }
    if (trouble != trouble_) {  // once, not for every batch
      if (trouble.empty()) {
        spdlog::info("spans exported again endpoint={}", url_);
      } else {
        spdlog::warn("spans not exported endpoint={} cause=\"{}\"", url_, trouble);
      }
      trouble_ = trouble;
    }
    if (trouble.empty()) return Outcome::kTaken;
    const bool later =
        code != CURLE_OK || status == 429 || status == 502 || status == 503 || status == 504;
    return later ? Outcome::kLater : Outcome::kRefused;
  }

  const Options options_;
  const std::string url_;
  // Used by the thread alone.
  const curl_handle::Handle curl_;
  const curl_handle::List headers_;
  std::string trouble_;  // of the last request

  std::atomic<bool> cut_short_{false};  // the request under way, which is not the last one
  std::atomic<int64_t> exported_{0};
  std::atomic<int64_t> dropped_{0};
  std::mutex mutex_;  // guards everything below but thread_
  std::condition_variable changed_;
  std::deque<Span> queue_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace

absl::StatusOr<std::unique_ptr<SpanExporter>> SpanExporter::Create(const Options& options) {
  if (absl::Status started = curl_handle::Start(); !started.ok()) return started;
  return std::make_unique<CurlExporter>(options);
}

}  // namespace tracing

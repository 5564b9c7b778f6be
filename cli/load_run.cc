#include "cli/load_run.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace cli {
namespace {

class MonotonicClock final : public LoadClock {
 public:
  absl::Duration Now() override {
    return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
  void SleepUntil(absl::Duration moment) override {
    std::this_thread::sleep_until(
        std::chrono::steady_clock::time_point(absl::ToChronoNanoseconds(moment)));
  }
};

// When each conversation is due after the start: a Poisson process, the same for equal seeds.
std::vector<absl::Duration> Arrivals(int32_t count, const LoadOptions& options) {
  std::vector<absl::Duration> due(count, absl::ZeroDuration());
  if (options.request_rate <= 0) return due;
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap(options.request_rate);
  double at = 0;
  for (absl::Duration& one : due) one = absl::Seconds(at += gap(random));
  return due;
}

class Run final {
 public:
  Run(const Trace& trace, const LoadOptions& options, LoadBackend& backend, LoadClock& clock,
      LoadProgress& progress)
      : trace_(trace),
        options_(options),
        backend_(backend),
        clock_(clock),
        progress_(progress),
        arrivals_(Arrivals(trace.num_conversations(), options)),
        start_(clock.Now()) {}

  LoadResult All() {
    std::vector<std::thread> users;
    const int32_t num_users = std::min(options_.concurrency, trace_.num_conversations());
    for (int32_t i = 0; i < num_users; ++i) {
      users.emplace_back([this] {
        for (int32_t index; (index = next_++) < trace_.num_conversations();) Hold(index);
      });
    }
    for (std::thread& user : users) user.join();
    std::sort(result_.good.begin(), result_.good.end(),
              [](const auto& a, const auto& b) { return a.due_ms < b.due_ms; });
    return std::move(result_);
  }

 private:
  void Hold(int32_t index) {
    const Conversation conversation = trace_.Get(index);  // made before it is due
    absl::Duration due = options_.request_rate > 0 ? start_ + arrivals_[index] : clock_.Now();
    clock_.SleepUntil(due);
    Prompt prompt;
    std::optional<int32_t> known = conversation.shared_tokens;
    for (size_t number = 0; number < conversation.turns.size(); ++number) {
      const Turn& turn = conversation.turns[number];
      if (number == 0) {
        prompt = turn.prompt;
      } else {
        prompt.ids.insert(prompt.ids.end(), turn.prompt.ids.begin(), turn.prompt.ids.end());
        due = clock_.Now();
      }
      const LoadRequest request = {prompt, turn.output_tokens,
                                   options_.seed + index * conversation.turns.size() + number};
      std::vector<uint32_t> answer;
      absl::StatusOr<MeasuredRequest> measured = Ask(request, due, &answer);
      if (!measured.ok()) {
        Count(measured.status(), due);
        for (size_t left = number + 1; left < conversation.turns.size(); ++left) {
          Count(absl::AbortedError("not sent: a turn before it failed"), due);
        }
        return;
      }
      measured->attainable_tokens = known;
      Count(*std::move(measured));
      // The next prompt begins with this one and its answer.  The last token of an answer is never
      // computed, so no cache has it; a stand-in's tokens are new to the server.
      known = static_cast<int32_t>(prompt.ids.size());
      if (answer.empty()) {
        answer = StandInAnswer(index, static_cast<int32_t>(number), turn.output_tokens,
                               options_.vocab_size, options_.seed);
      } else {
        *known += static_cast<int32_t>(answer.size()) - 1;
      }
      prompt.ids.insert(prompt.ids.end(), answer.begin(), answer.end());
    }
  }

  absl::StatusOr<MeasuredRequest> Ask(const LoadRequest& request, absl::Duration due,
                                      std::vector<uint32_t>* answer_ids) {
    std::vector<absl::Duration> arrivals;
    const absl::Duration sent = clock_.Now();
    ++progress_.running;
    const auto answer = backend_.Send(request, [&](uint32_t tokens) {
      arrivals.push_back(clock_.Now());
      progress_.output_tokens += tokens;
    });
    --progress_.running;
    RETURN_IF_ERROR(answer.status());
    if (arrivals.empty()) return absl::DataLossError("the answer has no output");
    *answer_ids = answer->output_ids;
    MeasuredRequest measured;
    measured.due_ms = absl::ToDoubleMilliseconds(due - start_);
    measured.late_ms = absl::ToDoubleMilliseconds(sent - due);
    measured.ttft_ms = absl::ToDoubleMilliseconds(arrivals.front() - due);
    measured.e2e_ms = absl::ToDoubleMilliseconds(arrivals.back() - due);
    for (size_t i = 1; i < arrivals.size(); ++i) {
      measured.itl_ms.push_back(absl::ToDoubleMilliseconds(arrivals[i] - arrivals[i - 1]));
    }
    measured.num_tokens = answer->output_tokens.value_or(arrivals.size());
    measured.tokens_told = answer->output_tokens.has_value();
    if (measured.num_tokens > 1) {
      measured.tpot_ms = (measured.e2e_ms - measured.ttft_ms) / (measured.num_tokens - 1);
    }
    measured.prompt_tokens = answer->prompt_tokens;
    measured.cached_tokens = answer->cached_tokens;
    measured.kv_bytes = answer->kv_bytes;
    return measured;
  }

  void Count(MeasuredRequest measured) {
    ++progress_.good;
    const std::lock_guard<std::mutex> lock(mutex_);
    EndAt((measured.due_ms + measured.e2e_ms) / 1e3);
    result_.good.push_back(std::move(measured));
  }
  void Count(const absl::Status& failure, absl::Duration due) {
    ++progress_.failed;
    const std::lock_guard<std::mutex> lock(mutex_);
    EndAt(absl::ToDoubleSeconds(std::max(due, clock_.Now()) - start_));
    ++result_.failures[absl::StrCat(absl::StatusCodeToString(failure.code()), ": ",
                                    std::string(failure.message()))];
  }
  void EndAt(double seconds) { result_.seconds = std::max(result_.seconds, seconds); }

  const Trace& trace_;
  const LoadOptions options_;
  LoadBackend& backend_;
  LoadClock& clock_;
  LoadProgress& progress_;
  const std::vector<absl::Duration> arrivals_;
  const absl::Duration start_;
  std::atomic<int32_t> next_{0};
  std::mutex mutex_;  // guards result_
  LoadResult result_;
};

}  // namespace

LoadClock& SteadyClock() {
  static MonotonicClock clock;
  return clock;
}

LoadResult RunLoad(const Trace& trace, const LoadOptions& options, LoadBackend& backend,
                   LoadClock& clock, LoadProgress& progress) {
  return Run(trace, options, backend, clock, progress).All();
}

}  // namespace cli

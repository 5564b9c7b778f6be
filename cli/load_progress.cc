#include "cli/load_progress.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_format.h"

namespace cli {
namespace {

constexpr int kBarWidth = 30;
constexpr auto kInterval = std::chrono::milliseconds(200);
constexpr char kWipe[] = "\r\x1b[K";  // to the line's start, and clear it

}  // namespace

std::string ProgressText(const LoadProgress& progress, int32_t num_requests, double seconds) {
  const int32_t failed = progress.failed;
  const int32_t ended = progress.good + failed;
  const auto filled = static_cast<int>(int64_t{kBarWidth} * ended / std::max(1, num_requests));
  const std::string bar = std::string(filled, '=') + (filled < kBarWidth ? ">" : "");
  const double elapsed = std::max(seconds, 1e-9);
  std::string text = absl::StrFormat("[%-*s] %d/%d  %.1f requests/s  %.0f tokens/s  %d running",
                                     kBarWidth, bar, ended, num_requests, ended / elapsed,
                                     static_cast<double>(progress.output_tokens) / elapsed,
                                     int32_t{progress.running});
  if (failed > 0) absl::StrAppendFormat(&text, "  %d failed", failed);
  return text;
}

ProgressLine::ProgressLine(const LoadProgress& progress, int32_t num_requests, std::ostream& out)
    : progress_(progress), num_requests_(num_requests), out_(out), thread_([this] { Show(); }) {}

ProgressLine::~ProgressLine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  end_.notify_all();
  thread_.join();
  out_ << kWipe << std::flush;
}

void ProgressLine::Show() {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!end_.wait_for(lock, kInterval, [this] { return ended_; })) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    out_ << kWipe << ProgressText(progress_, num_requests_, elapsed.count()) << std::flush;
  }
}

}  // namespace cli

// ProgressLine: one line of a terminal that says how far a load run is, until it is destroyed.

#ifndef CLI_LOAD_PROGRESS_H_
#define CLI_LOAD_PROGRESS_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>

#include "cli/load_run.h"

namespace cli {

// "[=====>    ] 60/120  5.9 requests/s  188 tokens/s  4 running  1 failed": rates since the start.
std::string ProgressText(const LoadProgress& progress, int32_t num_requests, double seconds);

class ProgressLine final {
 public:
  // Both must outlive the line; `out` is a terminal.
  ProgressLine(const LoadProgress& progress, int32_t num_requests, std::ostream& out);
  ~ProgressLine();  // wipes it

 private:
  void Show();

  const LoadProgress& progress_;
  const int32_t num_requests_;
  std::ostream& out_;
  std::mutex mutex_;  // guards ended_
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace cli

#endif  // CLI_LOAD_PROGRESS_H_

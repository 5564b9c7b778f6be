// StreamModel: what a client may see of one request, as ferry/v1/inference.proto and the oracle say
// it.  It knows nothing of workers, tries or caches.
//
// Thread-compatible.

#ifndef TESTS_CHAOS_STREAM_MODEL_H_
#define TESTS_CHAOS_STREAM_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ferry/v1/inference.pb.h"

namespace chaos {

class StreamModel final {
 public:
  // `expected`: the tokens of a single engine, by branch.
  StreamModel(size_t num_prompt_tokens, std::vector<std::vector<int32_t>> expected);

  void OnMessage(const ferry::v1::GenerateResponse& message);
  // The client gives up by itself; what comes afterwards is judged all the same.
  void OnClientLeaves() { client_left_ = true; }
  // `router_died`: at some time of the call.
  void OnEnd(const absl::Status& status, bool router_died = false);

  // The first thing that was wrong, or "".
  const std::string& wrong() const { return wrong_; }
  size_t num_tokens() const { return num_tokens_; }

 private:
  struct Branch {
    size_t seen = 0;
    bool finished = false;
  };
  void Wrong(const std::string& what);

  const size_t num_prompt_tokens_;
  const std::vector<std::vector<int32_t>> expected_;
  std::vector<Branch> branches_;
  size_t num_tokens_ = 0;
  bool has_summary_ = false;
  bool client_left_ = false;
  bool ended_ = false;
  std::string wrong_;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_STREAM_MODEL_H_

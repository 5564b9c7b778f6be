// PreparedRequest: a request that has been checked and completed: every default filled in, the
// prompt as token ids.  Made on an RPC thread, then owned by its Generation on the loop's thread.

#ifndef ROUTER_REQUEST_H_
#define ROUTER_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "block_hash/block_hash.h"
#include "router/model_assets.h"
#include "router/routing_policy.h"
#include "tracing/trace_context.h"

namespace ferry::v1 {
class GenerateRequest;
class RequestSpec;
}  // namespace ferry::v1

namespace router {

// How a prompt's text becomes ids, and the output's ids text.
struct TextRules {
  bool add_special_tokens = true;  // to a prompt, as the tokenizer says; false: it has its own BOS
  std::vector<int32_t> shown_special_ids = {};  // special tokens that stay in the output's text
};

struct RequestCall;  // router/admission.h

struct PreparedRequest {
  PreparedRequest();
  PreparedRequest(PreparedRequest&&) noexcept;
  PreparedRequest& operator=(PreparedRequest&&) noexcept;
  ~PreparedRequest();

  std::string request_id;
  const ModelAssets* model = nullptr;  // outlives the request
  std::vector<int32_t> tokens;         // the prompt; after a migration also the output so far
  bool max_tokens_stated = false;      // by the user; else it is cut to what fits the context
  std::vector<std::string> stops;
  bool include_stop = false;
  std::vector<int32_t> stop_ids;  // EOS included unless ignore_eos
  std::vector<int32_t> shown_special_ids;
  bool wants_logprobs = false;
  int32_t priority = 0;
  std::string tenant;           // "": nobody's
  absl::Duration max_ttft;      // 0: the router's
  absl::Time arrival;           // EventLoop::Now()
  absl::Time deadline;          // EventLoop::Now() clock
  int64_t bytes = 0;            // memory that the request holds while it waits
  std::string cache_namespace;  // root of the block hash chain
  tracing::TraceContext trace;
  std::shared_ptr<RequestCall> call;  // that it came in with others; null: alone
  // What the workers get, except attempt and deadline.
  std::unique_ptr<ferry::v1::RequestSpec> spec;

  int32_t num_prompt_tokens() const;  // of `tokens`: the user's
  RequestView view() const;
};

// The models by name that a router serves.
class ServedModels final {
 public:
  explicit ServedModels(std::vector<std::unique_ptr<ModelAssets>> models);
  // `name` may be empty if exactly one model is served.
  // Errors: kNotFound naming the model and those that are served; kInvalidArgument for an ambiguous
  // "".
  absl::StatusOr<const ModelAssets*> Find(const std::string& name) const;
  const std::vector<std::unique_ptr<ModelAssets>>& all() const { return models_; }
  std::vector<std::string> names() const;

 private:
  std::vector<std::unique_ptr<ModelAssets>> models_;
};

inline constexpr uint32_t kMaxBranches = 16;  // of a prompt
inline constexpr uint32_t kMaxLogprobs = 20;  // alternatives of a position

// Bytes of text whose tokenising is too long for an RPC thread.
inline constexpr size_t kInlineTokenizeBytes = 64 << 10;

inline constexpr size_t kMaxNameBytes = 128;  // of request_id and tenant

// Of request_id and tenant: printable ASCII without spaces, at most `max_bytes`.
// Errors: kInvalidArgument naming `field` and the value.
absl::Status CheckName(const char* field, const std::string& name,
                       size_t max_bytes = kMaxNameBytes);

// Checks everything but the prompt: model, names, sampling.
// Errors: kInvalidArgument naming field and value; kNotFound for the model.
absl::Status CheckParameters(const ferry::v1::GenerateRequest& request, const ServedModels& models);
// And of the prompt what can be checked without tokenising: ids, length bounds.
absl::Status CheckRequest(const ferry::v1::GenerateRequest& request, const ServedModels& models);

// Tokenises, fills in defaults and makes the spec.  `arrival` and `deadline` are left to the
// caller. REQUIRES: CheckRequest was OK. Errors: kInvalidArgument (text, prompt length, prompt +
// max_tokens).
absl::StatusOr<PreparedRequest> PrepareRequest(const ferry::v1::GenerateRequest& request,
                                               const ServedModels& models,
                                               const TextRules& text_rules = {});

// Of a prompt that `lengths` have no room for.
absl::Status PromptTooLong(int64_t prompt_tokens, const LengthLimits& lengths);

// A name for a request that has none.
std::string NewRequestId();

}  // namespace router

#endif  // ROUTER_REQUEST_H_
